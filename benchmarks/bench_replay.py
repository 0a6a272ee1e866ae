"""Question: how fast are recorded rollouts through the whole engine with drafts and without, on a
model of any size?

    python benchmarks/bench_replay.py --trace rollouts.npz --spec none ngram

The model has random weights and is forced to say what was recorded: accept lengths are real, and so
is the time. Rollouts of one step of the trace run together, and after each step the policy changes.
Bars, for 64 running on an H100 or H200 with the 8b shape: 1.9x plain decoding, nowhere below 1.0x.
Without --trace a made-up one is replayed; without a GPU the shape is `tiny` unless one is named,
which shows that it runs and says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forced import Recording, Step, force_draft, force_target, new_policy, steps, waves
from harness.command import Command, Parts
from harness.engines import forget
from harness.rows import Row, row
from harness.shapes import (
    Shape,
    add_shape_options,
    chosen_shapes,
    random_engine,
    write_config,
    write_draft,
)
from harness.traces import Trace, add_trace_option, load_traces

from spec_workers.neural.drafter import NeuralDrafter

NEURAL = ("eagle", "hybrid")

_HIT_RATE = 0.6
"""Share of positions at which a neural draft is told the recorded token."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """All steps of a replay, by wave."""

    waves: list[list[Step]]

    @property
    def steps(self) -> list[Step]:
        return [step for wave in self.waves for step in wave]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def accept_length(self) -> float:
        return self.tokens / sum(step.forwards for step in self.steps)


def replay(
    folder: Path, trace: Trace, *, spec: str, active: int, num_waves: int | None, hit_rate: float,
    **options: Any,
) -> Replayed:  # fmt: skip
    """Rollouts of each wave are checked to be the recorded ones.

    ``options``: of the engine. Raises RuntimeError where a rollout is not the recorded one.
    """
    engine = random_engine(
        folder, spec, max_running=active, max_step_tokens=max(2048, active), chunk_len=2048,
        **options,
    )  # fmt: skip
    worker: Any = engine.worker
    recording = Recording(trace)
    force_target(worker.target, recording)
    if isinstance(drafter := getattr(worker, "drafter", None), NeuralDrafter):
        force_draft(drafter, recording, hit_rate)
    chosen = waves(trace, active, num_waves)
    # Kernels compile, pages are touched; where forwards are captured, all of a wave's shapes come.
    captures = worker.target.graphs is not None
    for _ in steps(engine, trace, chosen[0] if captures else chosen[0][:8]):
        pass
    forget(engine)
    engine.flush_cache()
    found = []
    for number, wave in enumerate(chosen):
        found.append(list(steps(engine, trace, wave)))
        new_policy(engine, number)
    engine.check_integrity()
    return Replayed(found)


def _running_name(running: int) -> str:
    """Powers of four: 1, 2 to 4, 5 to 16, 17 to 64, ..."""
    last = 1
    while running > last:
        last *= 4
    return "1 running" if last == 1 else f"{last // 4 + 1} to {last} running"


def spec_options(spec: str, nodes: int, draft: Path) -> dict[str, Any]:
    if spec == "none":
        return {}
    options: dict[str, Any] = {"num_draft_tokens": nodes}
    return options | ({"draft_path": str(draft)} if spec in NEURAL else {})


def times(label: str, result: Replayed) -> Iterator[Row]:
    yield row(f"{label}: tokens", result.tokens / result.seconds, "tokens/s")
    unsteady = sum(step.seconds for step in result.steps if not step.is_warm)
    share = unsteady / result.seconds
    yield row(f"{label}: steps that compiled or captured", share, "of the time")
    yield row(f"{label}: accept length", result.accept_length, "tokens")
    by_running: dict[str, list[float]] = {}
    for step in result.steps:
        if step.is_warm:
            by_running.setdefault(_running_name(step.running), []).append(step.seconds)
    for running, seconds in by_running.items():
        yield row(f"{label}: a step of {running}", 1e3 * statistics.median(seconds), "ms")


def compare(label: str, plain: Replayed, result: Replayed, judged: bool) -> Iterator[Row]:
    yield row(f"{label}: speedup", plain.seconds / result.seconds, "x", 1.9 if judged else None)
    worst = min(
        Replayed([before]).seconds / Replayed([after]).seconds
        for before, after in zip(plain.waves, result.waves, strict=True)
    )
    yield row(f"{label}: worst step of the trace", worst, "x", 1.0 if judged else None)


def run(
    options: argparse.Namespace, trace: Trace, shape_name: str, shape: Shape, active: int
) -> Iterator[Row]:
    on_gpu = torch.device(options.device).type == "cuda"
    if (largest := trace.largest_token) >= shape.vocab_size:
        raise SystemExit(f"{trace.name}: token {largest} is beyond shape {shape_name}'s vocabulary")
    name = f"{trace.name}, {shape_name}, {active} active"
    judged = on_gpu and shape_name == "8b" and active == 64 and bool(options.trace)
    plain: Replayed | None = None
    with tempfile.TemporaryDirectory() as folder:
        model, draft = Path(folder) / "model", Path(folder) / "draft"
        write_config(model, shape)
        if any(spec in NEURAL for spec in options.spec):
            write_draft(draft, shape)
        for spec in options.spec:
            # Nobody else is on the GPU; on a CPU half of its memory would be touched for nothing.
            memory: dict[str, float] = {"kv_fraction": 0.9} if on_gpu else {"kv_bytes": 1 << 30}
            result = replay(
                model, trace, spec=spec, active=active, num_waves=options.steps,
                hit_rate=_HIT_RATE, spec_options=spec_options(spec, options.nodes, draft),
                device=options.device, dtype="bfloat16", **memory,
            )  # fmt: skip
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
            yield from times(f"{name}, {spec}", result)
            if spec == "none":
                plain = result
            elif plain is not None:
                yield from compare(f"{name}, {spec}", plain, result, judged)


def parts(options: argparse.Namespace) -> Parts:
    return {
        f"{trace.name}, {name}, {active} active": partial(run, options, trace, name, shape, active)
        for trace in load_traces(options.trace)
        for name, shape in chosen_shapes(options, "8b").items()
        for active in options.active
    }


def make_command() -> Command:
    command = Command(__doc__)
    add_shape_options(command)
    add_trace_option(command)
    command.option("--active", [64], nargs="+", help="rollouts at once")
    command.option(
        "--spec", ["none", "ngram"], nargs="+", help="none first: the others are compared with it"
    )
    command.option("--nodes", 8, help="most draft nodes per request")
    command.option("--steps", 2, quick=1, help="of the trace, from the first on")
    return command


if __name__ == "__main__":
    make_command().run("replay on {device}", parts)
