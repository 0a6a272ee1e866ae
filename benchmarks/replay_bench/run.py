"""One engine's way through a trace, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_corpus import forget
from traces import Trace

from replay_bench.forced import Recording, force_draft, force_target
from replay_bench.roofline import Ceilings
from replay_bench.shapes import Shape, send_random_weights
from rollout import RolloutEngine, SamplingParams
from spec_workers.neural.drafter import NeuralDrafter


@dataclass(slots=True)
class Spent:
    """Of some of the steps."""

    seconds: float = 0.0
    floor_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    forwards: int = 0  # requests sampled from, over the steps

    def add(self, seconds: float, floor_seconds: float, tokens: int, forwards: int) -> None:
        self.seconds += seconds
        self.floor_seconds += floor_seconds
        self.tokens += tokens
        self.steps += 1
        self.forwards += forwards

    @property
    def accept_length(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0


@dataclass(slots=True)
class Replayed:
    """What a replay took."""

    by_wave: list[Spent] = field(default_factory=list)
    by_running: dict[str, Spent] = field(default_factory=dict)  # most requests running at once
    total: Spent = field(default_factory=Spent)
    unsettled_seconds: float = 0.0  # of steps in which kernels compiled or graphs were captured


def waves(trace: Trace, active: int, limit: int | None) -> list[list[int]]:
    """Responses that run together: the trace's steps, joined until there are ``active`` of them."""
    found: list[list[int]] = [[]]
    for step in trace.steps:
        if len(found[-1]) >= active:
            found.append([])
        found[-1] += step
    return found[:limit]


def replay(
    folder: Path,
    shape: Shape,
    trace: Trace,
    *,
    spec: str,
    spec_options: dict[str, Any],
    active: int,
    num_waves: int | None,
    ceilings: Ceilings,
    hit_rate: float,
    overrides: dict[str, Any],
) -> Replayed:
    """Rollouts of each wave are checked to be the recorded ones.

    Raises RuntimeError where one is not.
    """
    engine = RolloutEngine.from_pretrained(
        str(folder), spec, spec_options=spec_options, load_format="dummy", max_running=active,
        max_step_tokens=max(2048, active), chunk_len=2048, overlap="never", **overrides,
    )  # fmt: skip
    worker: Any = engine.worker
    send_random_weights(engine, worker.target.model.weight_loaders())
    recording = Recording(trace)
    force_target(worker.target, recording)
    if isinstance(drafter := getattr(worker, "drafter", None), NeuralDrafter):
        force_draft(drafter, recording, hit_rate)
    result = Replayed()
    chosen = waves(trace, active, num_waves)
    # Kernels compile, pages are touched; where forwards are captured, all of a wave's shapes come.
    captures = worker.target.graphs is not None
    _run(engine, trace, chosen[0] if captures else chosen[0][:8])
    forget(engine)
    engine.flush_cache()
    for number, wave in enumerate(chosen):
        spent = Spent()
        for step in steps(engine, trace, wave):
            if not step.is_warm:
                result.unsettled_seconds += step.seconds
            floor = ceilings.forward_ms(shape, step.rows, step.sampled, step.kv_tokens) / 1e3
            name = _running_name(step.running)
            for kept in (spent, result.total, result.by_running.setdefault(name, Spent())):
                kept.add(step.seconds, floor, step.tokens, step.forwards)
        result.by_wave.append(spent)
        new_policy(engine, number)
    engine.check_integrity()
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    seconds: float
    running: int
    rows: int
    sampled: int  # rows of logits
    kv_tokens: int
    tokens: int
    forwards: int
    is_warm: bool


def steps(engine: RolloutEngine, trace: Trace, wave: list[int]) -> Iterator[Step]:
    """Run the responses of a wave together, on an engine whose target is forced.

    Raises RuntimeError where a rollout is not the recorded one.
    """
    for response in wave:
        prompt = int(trace.prompt_of_R[response])
        length = len(trace.responses[response])
        engine.submit(
            trace.prompts[prompt].tolist(),
            SamplingParams(max_new_tokens=length, ignore_eos=True),
            prompt_index=prompt,
            sample_index=response,
        )
    while engine.has_unfinished:
        started = time.perf_counter()
        ended = engine.step()
        seconds = time.perf_counter() - started
        for rollout in ended:
            if rollout.token_ids != trace.responses[rollout.sample_index].tolist():
                raise RuntimeError(f"response {rollout.sample_index} is not the recorded one")
        last = engine.last_step
        yield Step(
            seconds=seconds,
            running=last.running,
            rows=last.query_tokens,
            sampled=last.sampling + last.drafted,
            kv_tokens=last.kv_used,
            tokens=last.generated_tokens,
            forwards=last.sampling,
            is_warm=_is_warm(engine),
        )


def _is_warm(engine: RolloutEngine) -> bool:
    """Whether the last step's timing is steady-state."""
    worker: Any = engine.worker
    graphs = worker.target.graphs
    return worker.drafting_is_steady and (graphs is None or graphs.is_warm)


def _run(engine: RolloutEngine, trace: Trace, wave: list[int]) -> None:
    for _ in steps(engine, trace, wave):
        pass


def new_policy(engine: RolloutEngine, number: int) -> None:
    """Drafts see that the policy moved; one norm is sent again, which changes nothing."""
    worker: Any = engine.worker
    norm = worker.target.model.weight_loaders()["model.norm.weight"]
    tensors = [("model.norm.weight", norm.read())]
    engine.update_weights_from_tensor(tensors, weight_version=number + 2, partial=True)


def _running_name(running: int) -> str:
    """Powers of four: 1, 2 to 4, 5 to 16, 17 to 64, ..."""
    last = 1
    while running > last:
        last *= 4
    return "1 running" if last == 1 else f"{last // 4 + 1} to {last} running"
