"""Question: what does it take to sleep and to wake up, as a colocated trainer's engine does in each
of its steps? There are no bars.

    python benchmarks/bench_sleep.py --shape 8b --json sleep.json

Requests of many lengths run together, so that batches of many sizes come up: when nothing is
captured, when everything is, and after sleep and wake up, which drop all graphs. What that last run
takes beside a warm one is the price. Without a GPU the shape is `tiny`, and nothing is captured.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from decoding import open_engine
from harness.command import POSITIVE, Command
from harness.rows import Row, row
from harness.shapes import Shape, add_shape_options, config_folder, shape_parts
from harness.timing import wall_seconds

from rollout import RolloutEngine, SamplingParams

_PROMPT = 64  # tokens


def shape_rows(name: str, shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    label = f"sleep, {name}, {options.batch} requests"
    with config_folder(shape) as folder:
        started = time.perf_counter()
        engine = open_engine(
            folder, options.batch, _PROMPT + options.tokens, device=options.device, exact=True,
            nodes=options.nodes,
        )  # fmt: skip
    yield row(f"{label}: start", time.perf_counter() - started, "s")
    yield row(f"{label}: run that captures", _run(engine, options), "s")
    warm = _run(engine, options)
    yield row(f"{label}: run", warm, "s")
    yield row(f"{label}: graphs captured", _num_graphs(engine), "graphs")
    started = time.perf_counter()
    freed = engine.release_memory()
    yield row(f"{label}: release_memory", time.perf_counter() - started, "s")
    yield row(f"{label}: memory released", sum(freed.values()) / 2**30, "GiB")
    yield row(f"{label}: resume_memory", wall_seconds(engine.resume_memory), "s")
    woken = _run(engine, options)
    yield row(f"{label}: run after it", woken, "s")
    yield row(f"{label}: captures after it, beside the warm run", woken - warm, "s")
    yield row(f"{label}: graphs captured after it", _num_graphs(engine), "graphs")
    engine.close()
    del engine
    gc.collect()


def _run(engine: RolloutEngine, options: argparse.Namespace) -> float:
    """Seconds until the last has ended: the number of requests falls from all to one."""
    for index in range(options.batch):
        most = max(1, options.tokens * (index + 1) // options.batch)
        engine.submit(
            [index % 7 + 1] * _PROMPT,
            SamplingParams(max_new_tokens=most, ignore_eos=True, temperature=0.0),
            prompt_index=index,
        )
    started = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - started


def _num_graphs(engine: RolloutEngine) -> int:
    worker: Any = engine.worker
    graphs = worker.target.graphs
    return graphs.graph_runner.num_graphs if graphs is not None else 0


def make_command() -> Command:
    on_gpu = torch.cuda.is_available()
    command = Command(__doc__)
    add_shape_options(command)
    command.option("--batch", 64 if on_gpu else 4, quick=4, limits=POSITIVE, help="requests")
    command.option("--tokens", 384 if on_gpu else 12, quick=12, limits=POSITIVE, help="most of one")
    command.option("--nodes", 4, limits=(1, 63), help="draft nodes of each request")
    return command


if __name__ == "__main__":
    make_command().run("sleep and wake on {device}", shape_parts(shape_rows, "8b"))
