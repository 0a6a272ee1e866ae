"""Where the time of a decode step goes: kernels by time, and a trace of a few steps.

The engine is that of `bench_step.py`. Kernels are told by torch's profiler, those of CUDA graphs
too; how long a step takes is measured without it.

    python benchmarks/profile_step.py --shape 8b --case 8 --case 8+8 --traces FOLDER

Without a GPU the shape is `tiny` and what is told are torch's operators.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench_step import step_kind
from decoding import SETTLING, TIMED, context_lengths, open_engine, start, step_seconds, stop
from replay_bench.shape_options import add_shape_options, chosen_shapes
from replay_bench.shapes import Shape, write_config
from table import Row, finishing, parser, row
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
    """One engine for each number of draft nodes."""
    exact = not options.fast
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape)
        for nodes in dict.fromkeys(nodes for _, nodes in options.case):
            loads = {
                batch: context_lengths("even", batch, options.context)
                for batch, of in options.case
                if of == nodes
            }
            engine = open_engine(
                Path(folder), [*loads.values()], device=options.device, exact=exact, nodes=nodes
            )
            for batch, lengths in loads.items():
                load = f"{name}, {options.context} keys, batch {batch}"
                label = f"profile, {load}, {step_kind(exact, nodes)}"
                trace = None
                if options.traces is not None:
                    trace = options.traces / f"trace-{name}-{batch}-{nodes}.json.gz"
                yield from _case_rows(label, engine, lengths, trace)
            engine.close()
            del engine
            gc.collect()  # or its weights and keys stay beside the next one's


def _case_rows(
    label: str, engine: RolloutEngine, lengths: Sequence[int], trace: Path | None
) -> Iterator[Row]:
    batch = len(lengths)
    requests = start(engine, lengths)
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


def main(arguments_given: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    on_gpu = add_shape_options(arguments)
    arguments.add_argument(
        "--case", type=case, action="append", default=[], metavar="BATCH[+NODES]"
    )
    arguments.add_argument("--context", type=int, default=2048 if on_gpu else 256)
    arguments.add_argument("--fast", action="store_true", help="exact=false")
    arguments.add_argument("--traces", type=Path, metavar="FOLDER", help="one file for each case")
    options = arguments.parse_args(arguments_given)
    if options.context < 2 * (SETTLING + TIMED):
        arguments.error(f"--context={options.context}: must be >= {2 * (SETTLING + TIMED)}")
    options.case = options.case or [(1, 0), (8, 0), (32, 0), (8, 8)]
    with finishing(f"where a step's time goes, on {options.device}", options.json) as rows:
        for name, shape in chosen_shapes(options, ["8b"]).items():
            rows.extend(shape_rows(name, shape, options))


if __name__ == "__main__":
    main()
