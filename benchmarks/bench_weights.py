"""Question: how fast is a weight update by each transport beside a plain copy_ of the same bytes?

    python benchmarks/bench_weights.py [--threads 1] [--rounds 7] [--json FILE]

A figure is a whole update, checks and commit included, of an engine that has run before; the median
of rounds in which all transports take turns. The engine is a process of its own, and this one the
trainer. Bars: 0.7 of copy_'s speed in process, 0.4 through shared memory.

`--only "two ranks"` compares an engine of two ranks with one of one rank, and needs no model: give
it three cores. Bar: two take at most 1.15x the time of one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from harness.command import Command, parts_of
from harness.rows import Row, row
from harness.shapes import SHAPES, write_checkpoint
from harness.timing import Call, in_turns, paired
from weight_engine import (
    COPY,
    DISK,
    FLATTENED,
    GLOO,
    IN_PROCESS,
    SHARED,
    HeldWeights,
    WeightEngine,
)

from rollout.weights.bucket import CACHED_BUCKET_BYTES

MIB = 2**20
BUCKET_BYTES = (CACHED_BUCKET_BYTES, 16 * MIB)
BARS = {(IN_PROCESS, None): 0.7, (SHARED, CACHED_BUCKET_BYTES): 0.4}  # of the speed of copy_
RANKS_BAR = 1.15  # of an update to one rank
SHAPE = replace(SHAPES["demo"], num_heads=8, num_kv_heads=2, vocab_size=49_151)
"""The demo model's sizes, as far as two ranks can split it; neither half of its tables is even."""


def transport_rows(options: argparse.Namespace) -> Iterator[Row]:
    weights = HeldWeights(options.model)
    with WeightEngine(1, options.threads, options.model, weights, num_segments=2) as engine:
        engine.update(COPY)  # touches its buffers
        engine.update(IN_PROCESS)
        for size in (None, *BUCKET_BYTES):
            ways = (IN_PROCESS, DISK) if size is None else (FLATTENED, SHARED, GLOO)
            suffix = "" if size is None else f", {size // MIB} MiB buckets"
            calls: dict[str, Call] = {
                way: partial(engine.update, way, size or CACHED_BUCKET_BYTES) for way in ways
            }
            calls = {COPY: partial(engine.update, COPY), **calls}
            seconds = {way: median(each) for way, each in in_turns(calls, options.rounds).items()}
            for way, each in seconds.items():
                yield row(f"{way}{suffix}", weights.num_bytes / each / 1e9, "GB/s")
            for way in ways:
                ratio = seconds[COPY] / seconds[way]
                yield row(f"{way}{suffix} / copy_", ratio, "ratio", BARS.get((way, size)))


def rank_rows(options: argparse.Namespace) -> Iterator[Row]:
    shape = replace(SHAPE, num_layers=2, vocab_size=997) if options.quick else SHAPE
    with tempfile.TemporaryDirectory() as name:
        folder = write_checkpoint(Path(name), shape)
        weights = HeldWeights(folder)
        open_engine = partial(
            WeightEngine, threads=options.threads, folder=folder, weights=weights, num_segments=4
        )
        with open_engine(1) as one, open_engine(2) as two:
            for way in (IN_PROCESS, DISK, SHARED, GLOO):
                calls: dict[int, Call] = {
                    1: partial(one.update, way), 2: partial(two.update, way),
                }  # fmt: skip
                seconds = in_turns(calls, options.rounds)
                for size, each in seconds.items():
                    rate = weights.num_bytes / median(each) / 1e9
                    yield row(f"{way}, ranks {size}", rate, "GB/s")
                ratio = paired(seconds[2], seconds[1])
                label = f"{way}, ranks 2: time / ranks 1"
                yield row(label, ratio, "ratio", RANKS_BAR, at_most=True)


PARTS = {"transports": transport_rows, "two ranks": rank_rows}


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.threads(1)
    command.option("--rounds", 7, quick=1, help="that medians are taken of")
    return command


if __name__ == "__main__":
    make_command().run("weight updates, {threads} threads per process", parts_of(PARTS))
