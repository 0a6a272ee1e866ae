"""Question: how near are products and attention of an 8B model to their floors on a GPU, and to
what torch has for them, alone and as one of several tensor-parallel ranks?

    python benchmarks/bench_gpu_ops.py [--ranks 1 2 4 8] [--json FILE]

A floor is what the GPU needs at least: the bytes that have to move, or the arithmetic, whichever
takes longer, at the rates that this device is measured to have. Calls are captured in a graph, each
on buffers of its own, so that weights and keys come from memory and not from the cache. Bar, on an
H100 or H200: floor / time 0.7 for products of up to 32 rows. Where there is no GPU this says so and
ends well: the rows are `not run`.

Legend: as in `op_case.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from harness.command import Command, Parts
from harness.roofline import Ceilings
from harness.rows import Row, not_run, row
from harness.shapes import SHAPES
from op_case import Case, Workload, copies, each, make_padded_plan, microseconds, normal
from triton import TritonError

from rollout.ops.matmul import matmul
from rollout.ops.paged_attention import paged_attention

SHAPE = SHAPES["8b"]
E, H, K, D = SHAPE.hidden_size, SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
FFN, V = SHAPE.ffn_size, SHAPE.vocab_size
HEAD = "head"
CONTEXT = 2048
DECODE = (1, 8, 32)
ROWS = (*DECODE, 72, 288, 512, 2304)
ATTENTION = (
    *(Workload(name=f"decode {b}", requests=b, start=CONTEXT - 1) for b in (*DECODE, 64)),
    Workload(name="decode 32, one of 16k", requests=32, start=CONTEXT - 1, straggler=16383),
    *(Workload(name=f"tree {b}x(1+8)", requests=b, start=CONTEXT - 1, nodes=8) for b in DECODE),
    Workload(name="prefill 2048", requests=1, start=0, run_len=2048),
)


def products(ranks: int = 1) -> dict[str, tuple[int, int]]:
    """Output and input features of a rank's products: each computes a part of the outputs."""
    whole = {
        "qkv": ((H + 2 * K) * D, E), "o": (E, H * D), "gate_up": (2 * FFN, E), "down": (E, FFN),
        HEAD: (V, E),
    }  # fmt: skip
    return {name: (outputs // ranks, inputs) for name, (outputs, inputs) in whole.items()}


def product_cases(ranks: int) -> Iterator[Case]:
    for name, (outputs, inputs) in products(ranks).items():
        weights = [normal(outputs, inputs) for _ in range(copies(2 * outputs * inputs))]
        for rows in (*DECODE, 72) if name == HEAD else ROWS:
            xs = [normal(rows, inputs) for _ in weights]
            yield Case(
                name=f"matmul {name} {rows} rows",
                ours=each(matmul, xs, weights),
                theirs=each(F.linear, xs, weights),
                num_bytes=2 * (outputs * inputs + rows * (outputs + inputs)),
                flop=2 * rows * outputs * inputs,
                bar=0.7 if rows <= 32 and ranks == 1 else None,
            )
        del weights, xs


def attention_cases(ranks: int) -> Iterator[Case]:
    """Attention in any layer but the first, which also finds the step's list of work."""
    heads, kv_heads = H // ranks, K // ranks
    for load in ATTENTION:
        kv_bytes = 4 * load.slots * kv_heads * D
        plan, rows = make_padded_plan(load, "cuda")
        shape = (load.slots, kv_heads, D)
        pools = [(normal(*shape), normal(*shape)) for _ in range(copies(kv_bytes))]
        qs = [normal(rows, heads, D) for _ in pools]
        has_equal = not (load.nodes or load.straggler) and (load.start == 0 or load.run_len == 1)
        keys = sum(load.starts) / load.requests + (load.run_len + 1) / 2 + load.nodes / 2
        yield Case(
            name=f"attention {load.name}",
            ours=each(
                lambda q, kv, plan=plan: paged_attention(q, kv[0], kv[1], plan, D**-0.5), qs, pools
            ),
            theirs=each(_sdpa(load), qs, pools) if has_equal else (),
            num_bytes=kv_bytes + 4 * load.rows * heads * D,
            flop=4 * load.rows * keys * heads * D,
        )


def _sdpa(load: Workload) -> Callable[..., object]:
    """Torch's own, its keys gathered and contiguous, without padding."""

    def call(q_THD: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> object:
        k, v = (pool.unflatten(0, (load.requests, -1)).transpose(1, 2) for pool in pools)
        q = q_THD[: load.rows].unflatten(0, (load.requests, load.run_len)).transpose(1, 2)
        causal = load.run_len > 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return call


@torch.inference_mode()
def timed_rows(options: argparse.Namespace, ranks: int) -> Iterator[Row]:
    torch.manual_seed(0)
    ceilings = Ceilings.of(torch.device("cuda"))
    for cases in (product_cases, attention_cases):
        for case in cases(ranks):
            name = f"{case.name}, a rank of {ranks}" if ranks > 1 else case.name
            try:
                ours = microseconds(case.ours)
                theirs = microseconds(case.theirs) if case.theirs else ours
            except (RuntimeError, TritonError) as error:  # the others may be captured
                print(f"{name}: {error}", flush=True)
                yield not_run(name, "us")
                continue
            yield row(name, ours, "us")
            bar = case.bar if ceilings.judged else None
            yield row(f"{name}: floor / time", case.floor_us(ceilings) / ours, "ratio", bar)
            if case.theirs:
                yield row(f"{name}: time / torch", ours / theirs, "ratio")


def rows_without_gpu() -> Iterator[Row]:
    print("no GPU here: nothing was run")
    yield not_run("matmul qkv 1 rows: floor / time", "ratio", 0.7)


def parts(options: argparse.Namespace) -> Parts:
    if not torch.cuda.is_available():
        return {"no GPU": rows_without_gpu}
    return {f"ranks {ranks}": partial(timed_rows, options, ranks) for ranks in options.ranks}


def make_command() -> Command:
    command = Command(__doc__)
    command.option("--ranks", [1], nargs="+", help="that share a model")
    return command


if __name__ == "__main__":
    make_command().run("GPU ops at the 8B shape", parts)
