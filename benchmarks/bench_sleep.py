"""What it takes to sleep and to wake up: memory comes and goes, graphs are captured anew.

Requests of many lengths run together, so that batches of many sizes come up, three times: when
nothing is captured, when everything is, and after sleep and wake up, which drop all graphs. What
the third run takes beside the second is what a colocated trainer pays in each of its steps.

    python benchmarks/bench_sleep.py --shape 8b --json sleep.json

Without a GPU the shape is `tiny`, and nothing is captured.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from decoding import open_engine
from replay_bench.shape_options import add_shape_options, chosen_shapes
from replay_bench.shapes import Shape, write_config
from table import Row, finishing, parser, row

from rollout import RolloutEngine, SamplingParams

_PROMPT = 64  # tokens


def shape_rows(name: str, shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    """Each as soon as it is measured."""
    label = f"sleep, {name}, {options.batch} requests"
    lengths = [_PROMPT + options.tokens] * options.batch
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape)
        started = time.perf_counter()
        engine = open_engine(
            Path(folder), [lengths], device=options.device, exact=True, nodes=options.nodes
        )
    yield row(f"{label}: start", time.perf_counter() - started, "s")
    yield row(f"{label}: run that captures", _run(engine, options), "s")
    _run(engine, options)  # what came but once in the first is captured in this
    warm = _run(engine, options)
    yield row(f"{label}: run", warm, "s")
    yield row(f"{label}: graphs captured", _num_graphs(engine), "graphs")
    started = time.perf_counter()
    freed = engine.release_memory()
    yield row(f"{label}: release_memory", time.perf_counter() - started, "s")
    yield row(f"{label}: memory released", sum(freed.values()) / 2**30, "GiB")
    started = time.perf_counter()
    engine.resume_memory()
    yield row(f"{label}: resume_memory", time.perf_counter() - started, "s")
    woken = _run(engine, options)
    yield row(f"{label}: run after it", woken, "s")
    yield row(f"{label}: captures after it, beside the warm run", woken - warm, "s")
    yield row(f"{label}: graphs captured after it", _num_graphs(engine), "graphs")
    engine.close()


def _run(engine: RolloutEngine, options: argparse.Namespace) -> float:
    """Seconds until the last has ended: their number falls from all to one."""
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
    return graphs.runs.num_graphs if graphs is not None else 0


def main(arguments_given: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    on_gpu = add_shape_options(arguments)
    arguments.add_argument("--batch", type=int, default=64 if on_gpu else 4)
    arguments.add_argument("--tokens", type=int, default=384 if on_gpu else 12, help="most of one")
    arguments.add_argument("--nodes", type=int, default=4, help="draft nodes of each request")
    options = arguments.parse_args(arguments_given)
    with finishing(f"sleep and wake on {options.device}", options.json) as rows:
        for name, shape in chosen_shapes(options, ["8b"]).items():
            rows.extend(shape_rows(name, shape, options))
            gc.collect()


if __name__ == "__main__":
    main()
