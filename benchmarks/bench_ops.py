"""Question: is every CPU op at the demo model's shapes as fast as what torch has for it? Bars: each
takes at most torch's time.

    python benchmarks/bench_ops.py [--threads 2] [--json FILE]

Torch gets its keys gathered and contiguous beforehand; ours read them through req_to_token. As in a
step, calls go round the KV pools of 30 layers, so that keys come from where a step finds them.
Legend: R sampled rows, L layers, S slots; others as in `op_case.py`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from harness.command import Command, Parts
from harness.rows import Row, row
from harness.shapes import SHAPES
from harness.timing import Call, wall_seconds
from op_case import Case, Workload, make_plan, normal, row_cases

from rollout.models.layers.linear import FEW_ROWS, Linear
from rollout.models.layers.packed_weight import PackedWeight
from rollout.models.layers.row_invariance import make_row_invariant
from rollout.ops.categorical import categorical
from rollout.ops.paged_attention import paged_attention
from rollout.ops.panel_matmul import native
from rollout.ops.rms_norm import rms_norm
from rollout.ops.tile_matmul import native as tiles

SHAPE = SHAPES["demo"]
LAYERS, HEADS, KV_HEADS = SHAPE.num_layers, SHAPE.num_heads, SHAPE.num_kv_heads
HEAD_DIM = SHAPE.head_dim

WORKLOADS = (
    Workload(name="decode 1x512", requests=1, start=511),
    Workload(name="decode 8x512", requests=8, start=511),
    Workload(name="decode 32x512", requests=32, start=511),
    Workload(name="decode 1x8192", requests=1, start=8191),
    Workload(name="tree 1x(1+7)x512", requests=1, start=511, nodes=7),
    Workload(name="tree 8x(1+7)x512", requests=8, start=511, nodes=7),
    Workload(name="prefill 256x512", requests=1, start=256, run_len=256),
)

on_cpu = partial(normal, device="cpu")


def attention_case(load: Workload) -> Case:
    plan = make_plan(load)
    keys = load.start + load.run_len + load.nodes
    pool_LSKD = on_cpu(2 * LAYERS, load.requests * keys, KV_HEADS, HEAD_DIM)
    q_THD = on_cpu(load.rows, HEADS, HEAD_DIM)
    kv = pool_LSKD.view(2 * LAYERS, load.requests, keys, KV_HEADS, HEAD_DIM)
    kv = kv.transpose(2, 3).contiguous()
    rows = load.run_len + load.nodes
    visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    if rows <= 8:  # a group's heads as query rows: SDPA's own grouping is slow with few rows
        shape = (load.requests, rows, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        q = q_THD.view(shape).permute(0, 2, 3, 1, 4).flatten(2, 3)
        visible = visible.repeat(HEADS // KV_HEADS, 1)
    else:
        q = q_THD.view(load.requests, rows, HEADS, HEAD_DIM).transpose(1, 2)
    mask = None if rows == 1 else visible

    def ours(layer: int) -> object:
        k, v = pool_LSKD[layer], pool_LSKD[layer + LAYERS]
        return paged_attention(q_THD, k, v, plan, HEAD_DIM**-0.5)

    def theirs(layer: int) -> object:
        k, v = kv[layer], kv[layer + LAYERS]
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=rows > 8)

    return Case(
        name=f"paged_attention {load.name}",
        ours=[partial(ours, layer) for layer in range(LAYERS)],
        theirs=[partial(theirs, layer) for layer in range(LAYERS)],
    )


def norm_case(rows: int) -> Case:
    size = SHAPE.hidden_size
    x_TE, weight_E = on_cpu(rows, size), torch.ones(size, dtype=torch.bfloat16)
    return Case(
        name=f"rms_norm {rows} rows",
        ours=[partial(rms_norm, x_TE, weight_E, 1e-5)],
        theirs=[partial(F.rms_norm, x_TE, (size,), weight_E, 1e-5)],
    )


def categorical_case(rows: int) -> Case:
    logits_RV = torch.randn(rows, SHAPE.vocab_size) * 3
    temperature_R = torch.full((rows,), 0.7)
    uniform_R = torch.rand(rows, dtype=torch.float64)

    def theirs() -> object:
        logprobs_RV = torch.log_softmax(logits_RV / temperature_R.unsqueeze(1), dim=-1)
        tokens_R1 = torch.multinomial(logprobs_RV.exp(), 1)
        return tokens_R1, logprobs_RV.gather(1, tokens_R1)

    return Case(
        name=f"categorical {rows} rows",
        ours=[partial(categorical, logits_RV, temperature_R, uniform_R)],
        theirs=[theirs],
    )


def product_case(rows: int) -> Case:
    """Rows times the widest weight of a layer, round as many layers as a step reads."""
    outputs, inputs = 2 * SHAPE.ffn_size, SHAPE.hidden_size
    plain = on_cpu(outputs, inputs)
    packed = [PackedWeight.pack(plain) for _ in range(LAYERS)]
    opaque = [weight.opaque for weight in packed if weight is not None]
    linears = [
        Linear(inputs, outputs, dtype=plain.dtype, device=plain.device) for _ in range(LAYERS)
    ]
    x_TE = on_cpu(rows, inputs)
    for linear in linears:
        linear.weight_rows(0, outputs).write(plain)
        linear.pack()
    make_row_invariant(linears, rows)

    def theirs(weight: torch.Tensor) -> object:
        return torch.ops.mkldnn._linear_pointwise(x_TE, weight, None, "none", [], "")

    return Case(
        name=f"product of {rows} rows",
        ours=[partial(linear, x_TE) for linear in linears],
        theirs=[partial(theirs, weight) for weight in opaque],
    )


def cases() -> Iterator[Case]:
    yield from map(attention_case, WORKLOADS)
    if tiles.supports(torch.bfloat16, torch.device("cpu")):
        yield from map(product_case, (1, 8, 16, 32, FEW_ROWS, 64, 128, 512))
    elif native.supports(on_cpu(1, 2), on_cpu(1)):
        yield from map(product_case, (1, 2, 4, 6, 8, 12, 16, 24, FEW_ROWS))
    for rows in (1, 8, 32, 256):
        yield norm_case(rows)
        yield from row_cases(SHAPE, rows, "cpu", buffers=1)
    yield from map(categorical_case, (1, 8, 32))


def best_microseconds(calls: Sequence[Call], seconds: float) -> float:
    """The fastest of many calls: on a shared machine the others measure the neighbours."""
    turns = itertools.cycle(calls)
    next(turns)()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < deadline:
        best = min(best, wall_seconds(next(turns)))
    return best * 1e6


@torch.inference_mode()
def measure(seconds: float) -> Iterator[Row]:
    torch.manual_seed(0)
    for case in cases():
        ours, theirs = (best_microseconds(calls, seconds) for calls in (case.ours, case.theirs))
        yield row(case.name, ours, "us")
        yield row(f"{case.name} / torch", ours / theirs, "ratio", 1.0, at_most=True)


def parts(options: argparse.Namespace) -> Parts:
    return {"ops": partial(measure, options.seconds)}


def make_command() -> Command:
    command = Command(__doc__)
    command.threads(torch.get_num_threads())
    command.option("--seconds", 0.4, quick=0.001, help="of calls of each side of an op")
    return command


if __name__ == "__main__":
    make_command().run("CPU ops, {threads} threads", parts)
