"""Question: where does the time of a decode step go, kernel by kernel? There are no bars.

    python benchmarks/profile_step.py --case 32 --case 32+8 --mode exact --traces FOLDER

The engine is that of `bench_step.py`. Kernels are told by torch's profiler, those of CUDA graphs
too; how long a step takes is measured without it. Without a GPU the shape is `tiny` and what is
told are torch's operators.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from bench_step import step_kind
from decoding import TIMED, open_engine, start, step_seconds, stop
from harness.command import Command, Parts
from harness.rows import Row, row
from harness.shapes import Shape, add_shape_options, chosen_shapes, config_folder
from torch.profiler import ProfilerActivity, profile

from rollout import RolloutEngine

SHOWN = 14
"""Kernels of a case that get a row; the others are added up."""

MAX_TRACE_BYTES = 16 << 20
_PROFILED, _TRACED = 8, 2  # steps
_LONGEST_NAME = 70


def case(text: str) -> tuple[int, int]:
    """Requests, or requests + draft nodes of each."""
    batch, _, nodes = text.partition("+")
    return int(batch), int(nodes or 0)


def shape_rows(name: str, shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    """One engine for each mode and number of draft nodes."""
    with config_folder(shape) as folder:
        for mode in options.mode:
            for nodes in dict.fromkeys(nodes for _, nodes in options.case):
                batches = [batch for batch, of in options.case if of == nodes]
                exact = mode == "exact"
                engine = open_engine(
                    folder, max(batches), options.context, device=options.device, exact=exact,
                    nodes=nodes,
                )  # fmt: skip
                for batch in batches:
                    load = f"{name}, {options.context} keys, batch {batch}"
                    label = f"profile, {load}, {step_kind(exact, nodes)}"
                    trace = None
                    if options.traces is not None:
                        trace = options.traces / f"trace-{mode}-{batch}-{nodes}.json.gz"
                    yield from _case_rows(label, engine, batch, options.context, trace)
                engine.close()
                del engine
                gc.collect()  # or its weights and keys stay beside the next one's


def _case_rows(
    label: str, engine: RolloutEngine, batch: int, context: int, trace: Path | None
) -> Iterator[Row]:
    requests = start(engine, batch, context)
    plain_steps = TIMED - _PROFILED - _TRACED
    step_us = 1e6 * statistics.median(step_seconds(engine, batch) for _ in range(plain_steps))
    yield row(f"{label}: step", step_us, "us")
    kernels = kernel_us(_profiled(engine, batch, _PROFILED), _PROFILED)
    yield row(f"{label}: all kernels", kernels.total(), "us")
    yield row(f"{label}: all kernels / step", kernels.total() / step_us, "ratio")
    for kernel, microseconds in kernels.most_common(SHOWN):
        yield row(f"{label}: {kernel}", microseconds, "us")
    others = sum(microseconds for _, microseconds in kernels.most_common()[SHOWN:])
    yield row(f"{label}: {max(0, len(kernels) - SHOWN)} others", others, "us")
    if trace is not None:
        write_trace(_profiled(engine, batch, _TRACED), trace)
    stop(engine, requests)


def _profiled(engine: RolloutEngine, batch: int, steps: int) -> profile:
    on_gpu = engine.worker.model_device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiled:
        for _ in range(steps):
            step_seconds(engine, batch)
    return profiled


def kernel_us(profiled: profile, steps: int) -> Counter[str]:
    """Microseconds a step, by kernel; by operator where nothing ran on a GPU."""
    events = profiled.key_averages()
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    found: Counter[str] = Counter()
    for event in on_device or events:
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        found[event.key[:_LONGEST_NAME]] += spent / steps
    return found


def write_trace(profiled: profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(path))
    if (size := path.stat().st_size) > MAX_TRACE_BYTES:
        print(f"{path} is left out: {size >> 20} MiB", flush=True)
        path.unlink()


def parts(options: argparse.Namespace) -> Parts:
    usual = [(1, 0), (2, 3)] if options.quick else [(32, 0), (32, 8)]
    options.case = options.case or usual
    shapes = chosen_shapes(options, "8b")
    return {name: partial(shape_rows, name, shape, options) for name, shape in shapes.items()}


def make_command() -> Command:
    command = Command(__doc__)
    add_shape_options(command)
    command.option("--case", [], type=case, action="append", metavar="BATCH[+NODES]")
    command.option("--mode", ["exact", "fast"], nargs="+", choices=["exact", "fast"])
    usual = 2048 if torch.cuda.is_available() else 256
    command.option("--context", usual, quick=80, help="tokens of a request")
    command.option("--traces", type=Path, metavar="FOLDER", help="one file for each case")
    return command


if __name__ == "__main__":
    make_command().run("where a step's time goes, on {device}", parts)
