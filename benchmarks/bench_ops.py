"""Time of every CPU op on the demo model's shapes, beside what torch has for it.

    python benchmarks/bench_ops.py [--threads 2] [--json FILE]

Torch gets its keys gathered and contiguous beforehand; ours read them through req_to_token. As in a
step, calls go round the KV pools of 30 layers, so that keys come from where a step finds them.
Legend: B requests, T query rows, H heads, K kv heads, D head_dim, S slots.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from attention_workload import Workload, make_plan
from table import Row, finish, parser, row

from rollout.ops.categorical import categorical
from rollout.ops.paged_attention import paged_attention
from rollout.ops.rms_norm import add_rms_norm, rms_norm
from rollout.ops.rotary_store_kv import rotary_store_kv_
from rollout.ops.silu_mul import silu_mul

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 576, 9, 3, 64, 1536, 49152, 30
DTYPE = torch.bfloat16
EPS = 1e-5

Call = Callable[[], object]


WORKLOADS = (
    Workload(name="decode 1x512", requests=1, start=511),
    Workload(name="decode 8x512", requests=8, start=511),
    Workload(name="decode 32x512", requests=32, start=511),
    Workload(name="decode 1x8192", requests=1, start=8191),
    Workload(name="tree 1x(1+7)x512", requests=1, start=511, nodes=7),
    Workload(name="tree 8x(1+7)x512", requests=8, start=511, nodes=7),
    Workload(name="prefill 256x512", requests=1, start=256, run_len=256),
)


def best_microseconds(call: Call, seconds: float = 0.4) -> float:
    """The fastest of many calls: on a shared machine the others measure the neighbours."""
    call()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def attention_calls(load: Workload) -> tuple[Call, Call]:
    plan = make_plan(load)
    keys = load.start + load.run_len + load.nodes
    pool_LSKD = torch.randn(2 * LAYERS, load.requests * keys, KV_HEADS, HEAD_DIM).to(DTYPE)
    q_THD = torch.randn(load.rows, HEADS, HEAD_DIM).to(DTYPE)
    scale = HEAD_DIM**-0.5
    layers = itertools.cycle(range(LAYERS))

    def ours() -> object:
        layer = next(layers)
        return paged_attention(q_THD, pool_LSKD[layer], pool_LSKD[layer + LAYERS], plan, scale)

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

    def theirs() -> object:
        layer = next(layers)
        mask = None if rows == 1 else visible
        k, v = kv[layer], kv[layer + LAYERS]
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=rows > 8)

    return ours, theirs


def elementwise_calls(rows: int) -> Iterator[tuple[str, Call, Call]]:
    x_TE, residual_TE = torch.randn(2, rows, HIDDEN).to(DTYPE)
    weight_E = torch.ones(HIDDEN, dtype=DTYPE)
    yield (
        "rms_norm",
        lambda: rms_norm(x_TE, weight_E, EPS),
        lambda: F.rms_norm(x_TE, (HIDDEN,), weight_E, EPS),
    )
    yield (
        "add_rms_norm",
        lambda: add_rms_norm(x_TE, residual_TE, weight_E, EPS),
        lambda: F.rms_norm(residual_TE.add_(x_TE), (HIDDEN,), weight_E, EPS),
    )

    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS), HEAD_DIM).to(DTYPE)
    q_THD, k_TKD, v_TKD = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    positions_T = torch.randint(8192, (rows,))
    angles = torch.rand(8192, HEAD_DIM // 2)
    cos_sin_PR = torch.cat((angles.cos(), angles.sin()), dim=1)
    cos, sin = angles.repeat(1, 2).cos().to(DTYPE), angles.repeat(1, 2).sin().to(DTYPE)

    k_pool, v_pool = torch.zeros(2, 16384, KV_HEADS, HEAD_DIM, dtype=DTYPE)
    slots_T = torch.randperm(16384)[:rows]

    def torch_rotary_store_kv() -> None:
        c, s = cos[positions_T].unsqueeze(1), sin[positions_T].unsqueeze(1)
        for x in (q_THD, k_TKD):
            first, second = x.chunk(2, dim=-1)
            x.copy_(x * c + torch.cat((-second, first), dim=-1) * s)
        k_pool[slots_T] = k_TKD
        v_pool[slots_T] = v_TKD

    yield (
        "rotary_store_kv",
        lambda: rotary_store_kv_(
            q_THD, k_TKD, v_TKD, positions_T, cos_sin_PR, k_pool, v_pool, slots_T
        ),
        torch_rotary_store_kv,
    )

    gate_up = torch.randn(rows, 2 * FFN).to(DTYPE)
    yield (
        "silu_mul",
        lambda: silu_mul(gate_up),
        lambda: F.silu(gate_up[:, :FFN]) * gate_up[:, FFN:],
    )


def categorical_calls(rows: int) -> tuple[Call, Call]:
    logits_RV = torch.randn(rows, VOCAB) * 3
    temperature_R = torch.full((rows,), 0.7)
    uniform_R = torch.rand(rows, dtype=torch.float64)

    def theirs() -> object:
        logprobs_RV = torch.log_softmax(logits_RV / temperature_R.unsqueeze(1), dim=-1)
        tokens_R1 = torch.multinomial(logprobs_RV.exp(), 1)
        return tokens_R1, logprobs_RV.gather(1, tokens_R1)

    return lambda: categorical(logits_RV, temperature_R, uniform_R), theirs


def measure() -> Iterator[Row]:
    def compare(name: str, calls: tuple[Call, Call]) -> Iterator[Row]:
        ours, theirs = (best_microseconds(call) for call in calls)
        yield row(name, ours, "us")
        yield row(f"{name} / torch", ours / theirs, "ratio", 1.0, at_most=True)

    for load in WORKLOADS:
        yield from compare(f"paged_attention {load.name}", attention_calls(load))
    for count in (1, 8, 32, 256):
        for op, *calls in elementwise_calls(count):
            yield from compare(f"{op} {count} rows", (calls[0], calls[1]))
    for count in (1, 8, 32):
        yield from compare(f"categorical {count} rows", categorical_calls(count))


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    parsed = arguments.parse_args()
    torch.set_num_threads(parsed.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        finish(f"CPU ops, {parsed.threads} threads", list(measure()), parsed.json)


if __name__ == "__main__":
    main()
