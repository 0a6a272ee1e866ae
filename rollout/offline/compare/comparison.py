"""One engine decodes the same work plainly and with drafts, in turns, and both are compared."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from rollout.engine.engine import RolloutEngine
from rollout.offline.compare.paired_times import PairedTimes
from rollout.types import Prompt, Rollout, SamplingParams

_Key = tuple[int, int]  # prompt index, sample index

Side = Callable[[], AbstractContextManager[None]]
"""How an engine decodes while the context lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Samples of prompts, at most ``width`` of which are decoded together.

    A stretch has ``rounds`` times as many: where one ends the next begins, as in a job.
    """

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
        """The line that a reader should remember: how many rollouts of ``counted`` are the same,
        and what this comparison gained."""
        listed = list(counted)
        rollouts = sum(each.rollouts for each in listed)
        same = rollouts - sum(len(each.differing) for each in listed)
        return (
            f"same tokens and logprobs: {same} of {rollouts} | accept length "
            f"{self.accept_length:.2f} | {self.times} over plain decoding"
        )


class Comparison:
    """Drafting and plain decoding on the same weights and KV slots.

    The two sides of a pair follow each other in an order drawn at random, and begin with an empty
    prefix cache. Plain decoding teaches the drafts nothing, so that each rollout is new to the
    corpus when it is drafted for.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        baseline: Side | None = None,
        speculation: Side = nullcontext,
    ) -> None:
        """
        Args:
            baseline: of "plain" decoding; default: the engine's `without_speculation`.
            speculation: default: the engine as it is.
        """
        self._engine = engine
        self._sides = {True: baseline or engine.without_speculation, False: speculation}
        self._order = random.Random(0)  # of the order of sides

    def teach(self, work: Work) -> None:
        """Let the drafts learn from an epoch that is not compared."""
        for stretch in work.stretches():
            self._decode(work, stretch, plainly=False)

    def run(self, work: Work, seconds: float) -> Compared:
        """Compare until the work is done or ``seconds`` are over."""
        compared = Compared()
        ends = time.perf_counter() + seconds
        for stretch in work.stretches():
            if len(compared.times) and time.perf_counter() > ends:
                break
            self._compare(work, stretch, compared)
        return compared

    def _compare(self, work: Work, stretch: list[_Key], compared: Compared) -> None:
        forwards = self._engine.metrics().target_forwards
        spent: dict[bool, float] = {}
        made: dict[bool, dict[_Key, Rollout]] = {}
        for plainly in self._order.sample([True, False], 2):
            spent[plainly], made[plainly] = self._decode(work, stretch, plainly=plainly)
            if not plainly:
                compared.target_forwards += self._engine.metrics().target_forwards - forwards
            forwards = self._engine.metrics().target_forwards
        compared.times.add(spent[True], spent[False])
        compared.rollouts += len(stretch)
        compared.tokens += sum(len(rollout.token_ids) for rollout in made[False].values())
        compared.differing += [
            key for key in stretch if not _are_equal(made[True][key], made[False][key])
        ]

    def _decode(
        self, work: Work, stretch: list[_Key], *, plainly: bool
    ) -> tuple[float, dict[_Key, Rollout]]:
        """Decode some samples; returns the seconds it took, and the rollouts."""
        engine = self._engine
        engine.flush_cache()
        with self._sides[plainly]():
            started = time.perf_counter()
            rollouts: list[Rollout] = []
            for begun, (prompt_index, sample_index) in enumerate(stretch):
                while begun - len(rollouts) >= work.width:
                    rollouts += engine.step()
                engine.submit(
                    work.prompts[prompt_index],
                    work.params,
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                )
            while engine.has_unfinished:
                rollouts += engine.step()
            seconds = time.perf_counter() - started
        return seconds, {(each.prompt_index, each.sample_index): each for each in rollouts}


def _are_equal(first: Rollout, second: Rollout) -> bool:
    return first.token_ids == second.token_ids and first.logprobs == second.logprobs
