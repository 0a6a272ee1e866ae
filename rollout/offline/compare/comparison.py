"""Plain decoding and drafts do the same work, in turns, and are compared."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace

from rollout.engine.engine import RolloutEngine
from rollout.offline.compare.paired_times import PairedTimes
from rollout.types import Prompt, Rollout, SamplingParams

_Key = tuple[int, int]  # prompt index, sample index

Side = Callable[[RolloutEngine], AbstractContextManager[object]]
"""How an engine decodes while the context lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Samples of prompts, decoded ``width`` together, in stretches of ``width * rounds``."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    width: int
    rounds: int = 1

    def stretches(self) -> Iterator[list[_Key]]:
        """The requests in the order of a job, a stretch at a time."""
        keys = [(p, s) for p in range(len(self.prompts)) for s in range(self.params.n)]
        length = self.width * self.rounds
        for start in range(0, len(keys), length):
            yield keys[start : start + length]

    def of_epoch(self, epoch: int) -> Work:
        """This work with the seeds of another epoch, as a trainer's next step has them."""
        return replace(self, params=replace(self.params, seed=self.params.seed + epoch))


@dataclass(slots=True)
class Compared:
    """Results of decoding the same requests plainly and speculatively."""

    times: PairedTimes = field(default_factory=PairedTimes)
    rollouts: int = 0
    differing: list[_Key] = field(default_factory=list)  # tokens or logprobs did
    tokens: int = 0  # of one side
    target_forwards: int = 0  # of the speculative side, summed over requests

    @property
    def accept_length(self) -> float:
        """Tokens per target forward of a request, with drafts."""
        return self.tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second with drafts."""
        return self.tokens / sum(self.times.speculative_P) if self.tokens else 0.0

    def __str__(self) -> str:
        return self.line([self])

    def line(self, counted: Iterable[Compared]) -> str:
        """One line: equal rollouts of ``counted``; accept length and speedup of this comparison."""
        listed = list(counted)
        rollouts = sum(each.rollouts for each in listed)
        same = rollouts - sum(len(each.differing) for each in listed)
        return (
            f"same tokens and logprobs: {same} of {rollouts} | accept length "
            f"{self.accept_length:.2f} | {self.times} over plain decoding"
        )


class _Decoding:
    def __init__(self, engine: RolloutEngine, work: Work, stretch: list[_Key]) -> None:
        self.seconds = 0.0
        self.rollouts: dict[_Key, Rollout] = {}
        self._engine = engine
        self._work = work
        self._left = deque(stretch)
        self._running = 0
        self._forwards_before = engine.metrics().target_forwards

    @property
    def is_done(self) -> bool:
        return not self._left and not self._running

    @property
    def target_forwards(self) -> int:
        return self._engine.metrics().target_forwards - self._forwards_before

    def step(self) -> None:
        started = time.perf_counter()
        work = self._work
        while self._left and self._running < work.width:
            prompt_index, sample_index = self._left.popleft()
            self._engine.submit(
                work.prompts[prompt_index],
                work.params,
                prompt_index=prompt_index,
                sample_index=sample_index,
            )
            self._running += 1
        ended = self._engine.step()
        self._running -= len(ended)
        self.rollouts |= {(each.prompt_index, each.sample_index): each for each in ended}
        self.seconds += time.perf_counter() - started


class Comparison:
    """Drafting and plain decoding of the same stretches; each stretch makes one pair of times.

    One engine decodes a stretch with both sides in random order. Two engines decode it side by
    side, step by step, and swap sides after each stretch, so that drifts of the machine and an
    engine's memory layout affect both sides alike. Each stretch starts with an empty prefix cache.
    Plain decoding teaches the drafts nothing.
    """

    def __init__(
        self,
        *engines: RolloutEngine,
        baseline: Side = RolloutEngine.without_speculation,
        speculation: Side = nullcontext,
    ) -> None:
        """
        Args:
            engines: one, or two with the same configuration.
            baseline: of "plain" decoding.
            speculation: default: an engine as it is.
        """
        self._engines = engines
        self._sides = {True: baseline, False: speculation}
        self._random = random.Random(0)  # draws the order of the sides

    def teach(self, work: Work) -> None:
        """Let the drafts of every engine learn from an epoch that is not compared."""
        for engine in self._engines:
            for stretch in work.stretches():
                self._decode(work, stretch, {False: engine})

    def run(self, work: Work, seconds: float) -> Compared:
        compared = Compared()
        ends = time.perf_counter() + seconds
        for stretch in work.stretches():
            if len(compared.times) and time.perf_counter() > ends:
                break
            self._compare(work, stretch, compared)
        return compared

    def _compare(self, work: Work, stretch: list[_Key], compared: Compared) -> None:
        made: dict[bool, _Decoding] = {}
        if len(self._engines) == 1:
            for plainly in self._random.sample([True, False], 2):
                made |= self._decode(work, stretch, {plainly: self._engines[0]})
        else:
            is_odd = len(compared.times) % 2 == 1
            sides = zip((is_odd, not is_odd), self._engines, strict=True)
            made = self._decode(work, stretch, dict(sides))
        plain, drafting = made[True], made[False]
        compared.times.add(plain.seconds, drafting.seconds)
        compared.target_forwards += drafting.target_forwards
        compared.rollouts += len(stretch)
        compared.tokens += sum(len(rollout.token_ids) for rollout in drafting.rollouts.values())
        compared.differing += [
            key for key in stretch if not _are_equal(plain.rollouts[key], drafting.rollouts[key])
        ]

    def _decode(
        self, work: Work, stretch: list[_Key], engines: Mapping[bool, RolloutEngine]
    ) -> dict[bool, _Decoding]:
        """Decode the stretch by each of the sides; the one that has spent less time steps next."""
        made: dict[bool, _Decoding] = {}
        with ExitStack() as contexts:
            for plainly, engine in engines.items():
                engine.flush_cache()
                contexts.enter_context(self._sides[plainly](engine))
                made[plainly] = _Decoding(engine, work, stretch)
            while under_way := [each for each in made.values() if not each.is_done]:
                min(under_way, key=lambda each: each.seconds).step()
        return made


def _are_equal(first: Rollout, second: Rollout) -> bool:
    return first.token_ids == second.token_ids and first.logprobs == second.logprobs
