"""Question: how fast are recorded rollouts through the whole engine with drafts and without, on a
model of any size, and how near to the least time that the device allows?

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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forced import Recording, Step, force_draft, force_target, new_policy, steps, waves
from harness.command import POSITIVE, Command, Parts
from harness.engines import forget
from harness.roofline import Ceilings
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


@dataclass(slots=True)
class Spent:
    """Sums over some of the steps."""

    seconds: float = 0.0
    floor_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    forwards: int = 0  # requests sampled from, over the steps
    step_seconds: list[float] = field(default_factory=list)  # of steady steps

    def add(self, step: Step, floor_seconds: float) -> None:
        self.seconds += step.seconds
        self.floor_seconds += floor_seconds
        self.tokens += step.tokens
        self.steps += 1
        self.forwards += step.forwards
        if step.is_warm:
            self.step_seconds.append(step.seconds)

    @property
    def accept_length(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0


@dataclass(slots=True)
class Replayed:
    """All that a replay took."""

    by_wave: list[Spent] = field(default_factory=list)
    by_running: dict[str, Spent] = field(default_factory=dict)  # most requests running at once
    total: Spent = field(default_factory=Spent)
    warmup_seconds: float = 0.0  # of steps in which kernels compiled or graphs were captured


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
    engine = random_engine(
        folder, spec, spec_options=spec_options, max_running=active,
        max_step_tokens=max(2048, active), chunk_len=2048, **overrides,
    )  # fmt: skip
    worker: Any = engine.worker
    recording = Recording(trace)
    force_target(worker.target, recording)
    if isinstance(drafter := getattr(worker, "drafter", None), NeuralDrafter):
        force_draft(drafter, recording, hit_rate)
    result = Replayed()
    chosen = waves(trace, active, num_waves)
    # Kernels compile, pages are touched; where forwards are captured, all of a wave's shapes come.
    captures = worker.target.graphs is not None
    for _ in steps(engine, trace, chosen[0] if captures else chosen[0][:8]):
        pass
    forget(engine)
    engine.flush_cache()
    for number, wave in enumerate(chosen):
        spent = Spent()
        for step in steps(engine, trace, wave):
            if not step.is_warm:
                result.warmup_seconds += step.seconds
            floor = ceilings.forward_ms(shape, step.rows, step.sampled, step.kv_tokens) / 1e3
            running = result.by_running.setdefault(_running_name(step.running), Spent())
            for sums in (spent, result.total, running):
                sums.add(step, floor)
        result.by_wave.append(spent)
        new_policy(engine, number)
    engine.check_integrity()
    return result


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
    total = result.total
    yield row(f"{label}: tokens", total.tokens / total.seconds, "tokens/s")
    yield row(f"{label}: floor / time", total.floor_seconds / total.seconds, "ratio")
    compiled = result.warmup_seconds / total.seconds
    yield row(f"{label}: steps that compiled or captured", compiled, "of the time")
    if result.total.forwards:
        yield row(f"{label}: accept length", result.total.accept_length, "tokens")
    for running, spent in result.by_running.items():
        if spent.step_seconds:
            milliseconds = 1e3 * statistics.median(spent.step_seconds)
            yield row(f"{label}: a step of {running}", milliseconds, "ms")


def compare(label: str, plain: Replayed, result: Replayed, judged: bool) -> Iterator[Row]:
    speedup = plain.total.seconds / result.total.seconds
    yield row(f"{label}: speedup", speedup, "x", 1.9 if judged else None)
    pairs = zip(plain.by_wave, result.by_wave, strict=True)
    worst = min(before.seconds / after.seconds for before, after in pairs)
    bar = 1.0 if judged else None
    yield row(f"{label}: worst step of the trace", worst, "x", bar)


def run(
    options: argparse.Namespace, trace: Trace, shape_name: str, shape: Shape, active: int
) -> Iterator[Row]:
    device = torch.device(options.device)
    if (largest := trace.largest_token) >= shape.vocab_size:
        raise SystemExit(f"{trace.name}: token {largest} is beyond shape {shape_name}'s vocabulary")
    ceilings = Ceilings.of(device)
    overrides = {"device": options.device, "dtype": "bfloat16"}
    # Nobody else is on the GPU; on a CPU half of its memory would be touched for nothing.
    overrides |= {"kv_bytes": 1 << 30} if device.type == "cpu" else {"kv_fraction": 0.9}
    name = f"{trace.name}, {shape_name}, {active} active"
    judged = shape_name == "8b" and active == 64 and ceilings.judged and bool(options.trace)
    plain: Replayed | None = None
    with tempfile.TemporaryDirectory() as folder:
        model, draft = Path(folder) / "model", Path(folder) / "draft"
        write_config(model, shape)
        if any(spec in NEURAL for spec in options.spec):
            write_draft(draft, shape)
        for spec in options.spec:
            result = replay(
                model,
                shape,
                trace,
                spec=spec,
                spec_options=spec_options(spec, options.nodes, draft),
                active=active,
                num_waves=options.steps,
                ceilings=ceilings,
                hit_rate=_HIT_RATE,
                overrides=overrides,
            )
            gc.collect()
            if device.type == "cuda":
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
    command.option("--active", [64], nargs="+", limits=POSITIVE, help="rollouts at once")
    command.option(
        "--spec", ["none", "ngram"], nargs="+", help="none first: the others are compared with it"
    )
    command.option("--nodes", 8, limits=POSITIVE, help="most draft nodes per request")
    command.option("--steps", 2, quick=1, limits=POSITIVE, help="of the trace, from the first on")
    return command


if __name__ == "__main__":
    make_command().run("replay on {device}", parts)
