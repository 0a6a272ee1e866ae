"""Engines that do the same work side by side.

The speed of a shared machine wanders by tens of per cent over seconds. Timed one after the other,
two passes meet different machines; here the engines take turns of a fraction of a second, and
whoever is furthest behind in tokens has the next one. So the same part of the work is done at the
same time by all, and what slows one slows the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from rollout import RolloutEngine, SamplingParams
from rollout.types import Prompt

TURN_SECONDS = 0.25

SampleKey = tuple[int, int]
"""Prompt index and sample index."""


class Pass:
    """One engine's way through all samples of all prompts, submitted at once."""

    def __init__(
        self, engine: RolloutEngine, prompts: Sequence[Prompt], params: SamplingParams
    ) -> None:
        engine.flush_cache()
        engine.reset_metrics()
        self._engine = engine
        self.outputs: dict[SampleKey, list[int]] = {}
        prompts = [engine.encoder.encode(prompt) for prompt in prompts]
        started = time.perf_counter()
        for i, prompt in enumerate(prompts):
            for sample in range(params.n):
                engine.submit(prompt, params, prompt_index=i, sample_index=sample)
        self.seconds = time.perf_counter() - started

    @property
    def is_done(self) -> bool:
        return not self._engine.has_unfinished

    @property
    def num_tokens(self) -> int:
        """Emitted so far."""
        return self._engine.metrics().generated_tokens

    def run(self, seconds: float) -> None:
        """At least one step, and on until so much time has passed or all is done."""
        started = now = time.perf_counter()
        while now == started or (now < started + seconds and not self.is_done):
            for rollout in self._engine.step():
                key = (rollout.prompt_index, rollout.sample_index)
                self.outputs[key] = rollout.token_ids
            now = time.perf_counter()
        self.seconds += now - started


def race(passes: Sequence[Pass], turn_seconds: float = TURN_SECONDS) -> None:
    """Run all to their end; each counts its own time.

    Raises RuntimeError where two of them emitted different tokens.
    """
    while unfinished := [own for own in passes if not own.is_done]:
        min(unfinished, key=lambda own: own.num_tokens).run(turn_seconds)
    if any(own.outputs != passes[0].outputs for own in passes):
        raise RuntimeError("speculation changed the tokens")


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The order of a repeat: nobody always has the first turn."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def speedup(before: Sequence[float], after: Sequence[float]) -> float:
    """``before / after``, seconds measured in pairs: the median of the pairs' ratios.

    A ratio of the least times would compare a lucky moment of one with a lucky one of the other.
    """
    return median(slow / fast for slow, fast in zip(before, after, strict=True))
