"""Question: how near is one step of the whole engine to its floor, plain, exact and fast, and what
do draft nodes add to it?

    python benchmarks/bench_step.py --shape 8b --shape demo --json step.jsonl

A model of random weights decodes `--batch` requests at `--context` tokens each. A step is
everything: scheduling, the forward, sampling, commit. Its floor is the least time in which the
device can move the weights and keys, or do the arithmetic. Bars, on an H100 or H200 (docs/gpu.md):
floor / time 0.7 up to 32 requests, 8 nodes each 1.15x and 1.5x a step without, exactness 1.6x,
1.2 ms for the demo model. Without a GPU the shape is `tiny` and no bar applies.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from decoding import (
    TIMED,
    open_engine,
    start,
    step_seconds,
    stop,
)
from harness.command import Command
from harness.roofline import Ceilings
from harness.rows import Row, not_run, row
from harness.shapes import Shape, add_shape_options, config_folder, shape_parts
from triton import TritonError

from rollout import RolloutEngine, RolloutError

FLOOR_BARS = {"8b": 0.7}
"""Least floor / time of a plain step of up to 32 requests."""

NODES_BARS = {("8b", 8): 1.15, ("8b", 32): 1.5}
"""By shape and requests: most that 8 draft nodes each may take beside none."""

STEP_BARS = {("demo", 8): 1.2}
"""Most milliseconds of an exact step without draft nodes."""

EXACT_BARS = {"8b": 1.6}
"""Most that exactness may take beside none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    step_ms: float
    rows: int
    sampled: int
    kv_tokens: int


def measure(engine: RolloutEngine, batch: int, context: int) -> Timed:
    """The median of ``TIMED`` steps in which all decode."""
    requests = start(engine, batch, context)
    times = [step_seconds(engine, batch) for _ in range(TIMED)]
    last = engine.last_step
    stop(engine, requests)
    return Timed(
        step_ms=1e3 * statistics.median(times),
        rows=last.query_tokens,
        sampled=last.sampling + last.drafted,
        kv_tokens=last.kv_used,
    )


class Steps:
    """Rows of one shape, by how steps are run: each kind beside those that it is judged by."""

    def __init__(self, name: str, shape: Shape, ceilings: Ceilings, context: int) -> None:
        self._name, self._shape, self._ceilings, self._context = name, shape, ceilings, context
        self._took: dict[tuple[int, bool, int], float] = {}  # by requests, exactness, nodes

    def load(self, batch: int) -> str:
        return f"{self._name}, {self._context} keys, batch {batch}"

    def rows(self, timed: Timed, batch: int, exact: bool, nodes: int) -> Iterator[Row]:
        took, load = timed.step_ms, self.load(batch)
        self._took[batch, exact, nodes] = took
        label = f"{load}, {step_kind(exact, nodes)}"
        bar = STEP_BARS.get((self._name, batch)) if exact and not nodes else None
        yield self._row(label, took, "ms", bar, at_most=True)
        shape, ceilings = self._shape, self._ceilings
        floor = ceilings.forward_ms(shape, timed.rows, timed.sampled, timed.kv_tokens)
        bar = FLOOR_BARS.get(self._name) if not nodes and batch <= 32 else None
        yield self._row(f"{label}: floor / time", floor / took, "ratio", bar)
        if nodes and (before := self._took.get((batch, exact, 0))):
            bar = NODES_BARS.get((self._name, batch)) if nodes == 8 else None
            yield self._row(f"{label} / none", took / before, "ratio", bar, at_most=True)
        if not exact and (exactly := self._took.get((batch, True, nodes))):
            bar = EXACT_BARS.get(self._name) if not nodes else None
            drafts = f", {nodes} draft nodes each" if nodes else ""
            ratio = exactly / took
            yield self._row(f"{load}{drafts}: exact / fast", ratio, "ratio", bar, at_most=True)

    def _row(
        self, name: str, value: float, unit: str, bar: float | None, *, at_most: bool = False
    ) -> Row:
        judged = self._ceilings.judged
        return row(name, value, unit, bar if judged else None, at_most=at_most)


def step_kind(exact: bool, nodes: int) -> str:
    mode = "exact" if exact else "fast"
    return f"{mode}, {nodes} draft nodes each" if nodes else mode


def shape_rows(name: str, shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    steps = Steps(name, shape, Ceilings.of(torch.device(options.device)), options.context)
    with config_folder(shape) as folder:
        for exact, nodes in ((True, 0), (True, options.nodes), (False, 0), (False, options.nodes)):
            yield from _kind_rows(folder, steps, exact, nodes, options)
            gc.collect()  # or its weights and keys stay beside the next one's


def _kind_rows(
    folder: Path, steps: Steps, exact: bool, nodes: int, options: argparse.Namespace
) -> Iterator[Row]:
    """A kind of step on an engine of its own; where it fails, the next kind may be measured."""
    context = options.context
    try:
        engine = open_engine(
            folder, max(options.batch), context, device=options.device, exact=exact, nodes=nodes
        )
        for batch in options.batch:
            yield from steps.rows(measure(engine, batch, context), batch, exact, nodes)
        engine.close()
    except (RuntimeError, RolloutError, TritonError):
        traceback.print_exc()
        yield not_run(f"{steps.load(max(options.batch))}, {step_kind(exact, nodes)}", "ms")


def make_command() -> Command:
    command = Command(__doc__)
    add_shape_options(command)
    usual = 2048 if torch.cuda.is_available() else 256
    command.option("--batch", [1, 8, 32], quick=[2], nargs="+")
    command.option("--context", usual, quick=80, help="tokens of a request")
    command.option("--nodes", 8, help="draft nodes of each request")
    return command


if __name__ == "__main__":
    make_command().run("a step on {device}", shape_parts(shape_rows, "8b"))
