"""Questions: what do two cores gain for one model, and what does it cost that tensor-parallel ranks
have the bits of one? Bars: 2 ranks on 2 cores decode at batch 1 at least 1.4 times as fast as one
rank on one, and telling the other rank takes at most 3 % of a step at batch 8; on 2 ranks, the
products and exchanges of a layer take at most 1.1x those with partial sums, whose bits depend on
the number of ranks.

    python benchmarks/bench_ranks.py --only decoding --cores 0 1 --json decoding.json
    python benchmarks/bench_ranks.py --shape demo --shape 8b --ranks 1 2 4 --json ranks.json

Ranks are processes on this machine. Those that decode, by default a model of the demo's size whose
heads 2 ranks can share, have a core of `--cores` each and one thread. Those of a layer have
`--threads` each; give each its own cores. The layer is dense, bfloat16, with random weights and
without its attention. A rank alone exchanges nothing, and both ways are the same.
Legend: T rows, I input, O output features.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from harness.command import POSITIVE, Command, Parts
from harness.rows import Row, row
from harness.shapes import SHAPES, Shape
from harness.timing import in_turns, paired
from rank_decoding import decoding_rows
from torch.distributed import FileStore  # type: ignore[attr-defined]

from rollout.models.layers.linear import Linear
from rollout.models.layers.shard import split_product
from rollout.ops.glu import silu_mul
from rollout.parallel import ProcessRanks, RankGroup
from rollout.parallel.partition import even_parts

CPU = torch.device("cpu")
SECONDS = 120.0  # that a rank waits for the others
BAR = 1.1


@dataclass(frozen=True, slots=True)
class Job:
    """The timings of one rank. All ranks make the same calls."""

    shape: Shape
    size: int
    rows: list[int]
    repeats: int
    threads: int


def product(inputs: int, outputs: int) -> Linear:
    linear = Linear(inputs, outputs, dtype=torch.bfloat16, device=CPU)
    linear.weight_rows(0, outputs).write(torch.randn(outputs, inputs) / inputs**0.5)
    linear.pack()
    return linear


class RankLayer:
    """A rank's part of a layer, each row-parallel product in both ways."""

    def __init__(self, shape: Shape, group: RankGroup) -> None:
        self.group, hidden = group, shape.hidden_size
        widths = shape.num_heads * shape.head_dim, shape.ffn_size
        self.inputs = [even_parts(width, group.size) for width in widths]
        self.outputs = even_parts(hidden, group.size)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        own = [len(parts[group.rank]) for parts in self.inputs]
        self.firsts = [
            product(hidden, len(even_parts(heads * shape.head_dim, group.size)[0])),
            product(hidden, 2 * own[1]),
        ]
        self.split = [product(width, len(self.outputs[group.rank])) for width in widths]
        self.partial = [product(width, hidden) for width in own]

    def second(self, half: int, x_TI: torch.Tensor, *, sums: bool) -> torch.Tensor:
        if not sums:
            inputs, outputs = self.inputs[half], self.outputs
            return split_product(self.split[half], x_TI, self.group, inputs, outputs)
        return self.group.all_gather(self.partial[half](x_TI)).float().sum(0).to(x_TI.dtype)

    @torch.inference_mode()
    def run(self, x_TE: torch.Tensor, attended_TI: torch.Tensor, *, sums: bool) -> None:
        self.firsts[0](x_TE)
        hidden_TE = self.second(0, attended_TI, sums=sums)
        self.second(1, silu_mul(self.firsts[1](hidden_TE)), sums=sums)


def timed(rank: int, job: Job, meeting: str) -> dict[int, dict[bool, list[float]]]:
    """Seconds by rows, and by whether partial sums are added."""
    torch.set_num_threads(job.threads)
    store = FileStore(meeting, job.size)
    group = ProcessRanks(store, rank, job.size, device=CPU, timeout=SECONDS)
    layer, found = RankLayer(job.shape, group), {}
    attended = len(layer.inputs[0][rank])
    for rows in job.rows:
        x_TE = torch.randn(rows, job.shape.hidden_size).bfloat16()
        attended_TI = torch.randn(rows, attended).bfloat16()
        calls = {sums: partial(layer.run, x_TE, attended_TI, sums=sums) for sums in (False, True)}
        found[rows] = in_turns(calls, job.repeats, warm=3)
    return found


def rank_rows(name: str, job: Job) -> Iterator[Row]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "ranks")
        others = [
            spawn.Process(target=timed, args=(rank, job, meeting)) for rank in range(1, job.size)
        ]
        try:
            for other in others:
                other.start()
            found = timed(0, job, meeting)
        finally:
            for other in others:
                other.kill()
                other.join()
    for rows, seconds in found.items():
        label = f"{name}, ranks {job.size}, rows {rows}: a layer's products"
        yield row(label, 1e6 * statistics.median(seconds[False]), "us")
        if job.size > 1:
            bar = BAR if job.size == 2 else None
            ratio = paired(seconds[False], seconds[True])
            yield row(f"{label} / partial sums", ratio, "ratio", bar, at_most=True)


def parts(options: argparse.Namespace) -> Parts:
    tiny = ["tiny"] if options.quick else []
    decoding = {
        f"decoding, {name}": partial(
            decoding_rows,
            name,
            SHAPES[name],
            options.cores,
            steps=options.steps,
            repeats=options.turns,
        )
        for name in options.shape or tiny or ["even"]
    }
    return decoding | {
        f"layer of {name}, ranks {size}": partial(
            rank_rows,
            name,
            Job(SHAPES[name], size, options.rows, options.repeats, options.threads),
        )
        for name in options.shape or tiny or ["8b"]
        for size in options.ranks
    }


def make_command() -> Command:
    command = Command(__doc__)
    command.option("--shape", [], choices=SHAPES, action="append", help="of model and layer")
    command.option("--cores", [0, 1], nargs="+", help="one for each rank that decodes")
    command.option("--steps", 100, quick=3, limits=POSITIVE, help="of a turn")
    command.option("--turns", 9, quick=1, limits=POSITIVE, help="of each number of ranks")
    command.option("--ranks", [1, 2], quick=[2], nargs="+", limits=POSITIVE)
    command.option("--rows", [1, 8, 64], quick=[2], nargs="+", limits=POSITIVE, help="of a step")
    command.repeats(200)
    command.threads(1)
    return command


if __name__ == "__main__":
    make_command().run("ranks that run one model", parts)
