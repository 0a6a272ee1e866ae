"""Engines that decode the same work side by side.

They take turns of a fraction of a second, and whoever is furthest behind in tokens has the next
one. So all of them do the same part of the work at the same time, and what slows one slows the
others. Draft tokens must not be seen in the output: a race of different tokens is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.timing import paired, rotated
from rollout import RolloutEngine, SamplingParams
from rollout.engine.metrics import EngineMetrics
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
        """Tokens emitted so far."""
        return self._engine.metrics().generated_tokens

    def run(self, seconds: float) -> None:
        """Take at least one step, and more until so much time has passed or all is done."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Races:
    """All repeats of a race. ``metrics`` and ``lengths`` (of rollouts) are of the last repeat."""

    seconds: dict[str, list[float]]  # by engine, one for each repeat
    metrics: dict[str, EngineMetrics]
    lengths: list[int]

    def speedup(self, name: str, over: str) -> float:
        return paired(self.seconds[over], self.seconds[name])

    def tokens_per_second(self, name: str) -> float:
        return self.metrics[name].generated_tokens / self.seconds[name][-1]

    def describe(self) -> str:
        """Seconds, shares of time, and accepted and verified nodes of each engine."""
        parts = []
        for name, own in self.metrics.items():
            seconds = " ".join(f"{each:.2f}" for each in self.seconds[name])
            shares = ", ".join(
                f"{part} {getattr(own, f'{part}_ms') / own.total_ms:.1%}"
                for part in ("forward", "draft", "sample", "schedule")
            )
            parts.append(f"{name} {seconds} s: {shares}")
            if own.drafted:
                nodes = own.drafted / own.target_forwards
                parts[-1] += f", accept length {own.accept_length:.2f}, {nodes:.2f} nodes verified"
        return "; ".join(parts)


def hold_races(
    engines: Mapping[str, RolloutEngine],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    repeats: int,
    prepare: Callable[[], object],
) -> Races:
    """Race ``repeats`` times, each with a seed of its own, ``prepare`` having been called."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats):
        prepare()
        seeded = replace(params, seed=params.seed + repeat)
        passes = {
            name: Pass(engines[name], prompts, seeded) for name in rotated(list(engines), repeat)
        }
        race(list(passes.values()))
        for name, own in passes.items():
            seconds[name].append(own.seconds)
    return Races(
        seconds=seconds,
        metrics={name: engine.metrics() for name, engine in engines.items()},
        lengths=[len(tokens) for tokens in next(iter(passes.values())).outputs.values()],
    )
