"""Question: how near is every GPU op at the shape of an 8B model to its floor, and to what torch
has for it? Which tiles should its matrix product have?

    python benchmarks/bench_gpu_ops.py [--ops step recurrent sweep] [--json FILE]
    python benchmarks/bench_gpu_ops.py --ops padding      # needs no GPU

A floor is what the GPU needs at least: the bytes that have to move, or the arithmetic, whichever
takes longer, at the rates that this device is measured to have. Calls are captured in a graph, each
on buffers of its own, so that weights and keys come from memory and not from the cache. Bars, on an
H100 or H200: floor / time 0.7 for products of up to 32 rows and for all ops of a step; exactness
1.6x; draft nodes 1.15x; a tile's padding 1.5x. Where there is no GPU this says so and ends well:
the rows are `not run`.

Legend: as in `op_case.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from harness.command import Command, Part, Parts
from harness.roofline import Ceilings, add_floors_option
from harness.rows import Row, not_run, row
from harness.shapes import SHAPES
from op_case import Case, Workload, copies, each, make_padded_plan, microseconds, normal, row_cases
from recurrent_cases import QWEN3_NEXT, recurrent_cases
from tile_sweep import padding, sweep
from triton import TritonError

from rollout.ops.categorical import categorical
from rollout.ops.matmul import matmul
from rollout.ops.paged_attention import paged_attention
from rollout.ops.tree_accept import accept
from rollout.ops.truncation import truncation_threshold

SHAPE = SHAPES["8b"]
LAYERS, E, H, K = SHAPE.num_layers, SHAPE.hidden_size, SHAPE.num_heads, SHAPE.num_kv_heads
D, FFN, V = SHAPE.head_dim, SHAPE.ffn_size, SHAPE.vocab_size
LINEARS = {"qkv": ((H + 2 * K) * D, E), "o": (E, E), "gate_up": (2 * FFN, E), "down": (E, FFN)}
HEAD = {"head": (V, E)}
CONTEXT = 4096
OPS = ["step", "recurrent"]
TILES = ["sweep", "padding"]  # of matmul, where asked for
DECODE = (1, 8, 32)
ROWS = (*DECODE, 72, 128, 512, 2048, 8192)
ATTENTION = (
    *(Workload(name=f"decode {b}", requests=b, start=CONTEXT - 1) for b in (*DECODE, 64)),
    Workload(name="decode 1 of 32k", requests=1, start=32767),
    Workload(name="decode 256 of 2k", requests=256, start=2047),
    Workload(name="decode 16, one of 16k", requests=16, start=2047, straggler=16383),
    Workload(name="decode 32, one of 16k", requests=32, start=2047, straggler=16383),
    *(Workload(name=f"tree {b}x(1+8)", requests=b, start=CONTEXT - 1, nodes=8) for b in DECODE),
    Workload(name="prefill 2048", requests=1, start=0, run_len=2048),
    Workload(name="prefill 2048 after 8192", requests=1, start=8192, run_len=2048),
)

Times = dict[str, tuple[float, float]]
"""Microseconds of ours and of torch's, ours where it has none, by the case's name."""


def step_cases() -> Iterator[Case]:
    for name, (outputs, inputs) in (LINEARS | HEAD).items():
        weights = [normal(outputs, inputs) for _ in range(copies(2 * outputs * inputs))]
        for rows in ROWS if name in LINEARS else (*DECODE, 72):
            xs = [normal(rows, inputs) for _ in weights]
            yield Case(
                name=f"matmul {name} {rows} rows",
                ours=each(matmul, xs, weights),
                theirs=each(F.linear, xs, weights),
                num_bytes=2 * (outputs * inputs + rows * (outputs + inputs)),
                flop=2 * rows * outputs * inputs,
                bar=0.7 if rows <= 32 else None,
            )
        del weights, xs
    for load in ATTENTION:
        yield from _attention_cases(load)
    for rows in (*DECODE, 72, 2048):
        yield from row_cases(SHAPE, rows, "cuda", buffers=16)
    for rows in (*DECODE, 72, 576):
        yield from _sampling_cases(rows)
    nodes = torch.arange(64 * 8, device="cuda")
    counts = torch.arange(65, dtype=torch.int32, device="cuda")
    tree = (
        torch.zeros(64 * 9, dtype=torch.int64, device="cuda"), counts * 9,
        torch.zeros_like(nodes).int(), (nodes % 8).int(), (1 << (nodes % 8 + 2)) - 1, counts * 8,
    )  # fmt: skip
    yield Case(name="tree_accept 64x8", ours=[lambda: accept(*tree)] * 8)


def _attention_cases(load: Workload) -> Iterator[Case]:
    """Attention in any layer but the first; for steps of drafts in the first one too, where the
    step's list of work and its nodes' keys are found."""
    kv_bytes = 4 * load.slots * K * D
    plan, rows = make_padded_plan(load, "cuda")
    shape = (load.slots, K, D)
    pools = [(normal(*shape), normal(*shape)) for _ in range(copies(kv_bytes))]
    qs = [normal(rows, H, D) for _ in pools]
    has_equal = not (load.nodes or load.straggler) and (load.start == 0 or load.run_len == 1)
    keys = sum(load.starts) / load.requests + (load.run_len + 1) / 2 + load.nodes / 2
    if load.nodes:
        yield Case(
            name=f"attention {load.name}, first layer",
            ours=each(
                lambda q, kv: paged_attention(q, kv[0], kv[1], replace(plan), D**-0.5), qs, pools
            ),
        )
    yield Case(
        name=f"attention {load.name}",
        ours=each(lambda q, kv: paged_attention(q, kv[0], kv[1], plan, D**-0.5), qs, pools),
        theirs=each(_sdpa(load), qs, pools) if has_equal else (),
        num_bytes=kv_bytes + 4 * load.rows * H * D,
        flop=4 * load.rows * keys * H * D,
    )


def _sdpa(load: Workload) -> Callable[..., object]:
    """Torch's own, its keys gathered and contiguous, without padding."""

    def call(q_THD: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> object:
        k, v = (pool.view(load.requests, -1, K, D).transpose(1, 2) for pool in pools)
        q = q_THD[: load.rows].view(load.requests, load.run_len, H, D).transpose(1, 2)
        causal = load.run_len > 1
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return call


def _sampling_cases(rows: int) -> Iterator[Case]:
    logits = [normal(rows, V) * 3 for _ in range(4)]
    temperature = torch.full((rows,), 0.7, device="cuda")
    uniform = torch.rand(rows, dtype=torch.float64, device="cuda")
    yield Case(
        name=f"categorical {rows} rows",
        ours=each(lambda x: categorical(x, temperature, uniform), logits),
        theirs=each(_multinomial, logits),
        num_bytes=2 * rows * V,
    )
    wide = [x.float() for x in logits]
    k, p = torch.full((rows,), 50, device="cuda"), torch.full((rows,), 0.95, device="cuda")
    yield Case(
        name=f"truncation {rows} rows",
        ours=each(lambda x: truncation_threshold(x, temperature, k, p, p * 0), wide),
        theirs=each(lambda x: x.sort(dim=1, descending=True)[0].softmax(1).cumsum(1), wide),
        num_bytes=4 * rows * V,
    )


def _multinomial(logits_RV: torch.Tensor) -> torch.Tensor:
    """The draw of torch.multinomial, without its checks of the input, which wait for the device."""
    weights_RV = torch.softmax(logits_RV.float() / 0.7, -1)
    return (weights_RV / torch.empty_like(weights_RV).exponential_()).argmax(-1)


def measure(cases: Iterator[Case], ceilings: Ceilings, times: Times) -> Iterator[Row]:
    """Rows of the cases; adds to ``times``."""
    for case in cases:
        try:
            ours = microseconds(case.ours)
            theirs = microseconds(case.theirs) if case.theirs else ours
        except (RuntimeError, TritonError) as error:  # it cannot be captured; the others may be
            print(f"{case.name}: {error}", flush=True)
            yield not_run(case.name, "us")
            continue
        times[case.name] = ours, theirs
        yield row(case.name, ours, "us")
        if floor_us := case.floor_us(ceilings):
            bar = case.bar if ceilings.judged else None
            yield row(f"{case.name}: floor / time", floor_us / ours, "ratio", bar)
        if case.theirs:
            yield row(f"{case.name}: time / torch", ours / theirs, "ratio")


def step_us(times: Times, rows: int, attention: str, *, fast: bool) -> float:
    """All ops of a step, drawing included: with torch's matrix products, or with ours."""
    products = [times[f"matmul {name} {rows} rows"][fast] for name in LINEARS]
    others = [f"{op} {rows} rows" for op in ("silu_mul", "rotary_store_kv")]
    others += [f"add_rms_norm {rows} rows"] * 2 + [f"attention {attention}"]
    layer = sum(products) + sum(times[name][0] for name in others)
    last = times[f"matmul head {rows} rows"][fast] + times[f"categorical {rows} rows"][0]
    return LAYERS * layer + last


def step_rows(times: Times, ceilings: Ceilings) -> Iterator[Row]:
    """The rows of whole steps; none where one of the ops was not timed."""
    try:
        yield from list(_step_rows(times, ceilings))
    except KeyError as missing:
        print(f"no steps are added up: {missing} was not timed", flush=True)


def _step_rows(times: Times, ceilings: Ceilings) -> Iterator[Row]:
    judged = ceilings.judged
    for rows in DECODE:
        exact = step_us(times, rows, f"decode {rows}", fast=False)
        fast = step_us(times, rows, f"decode {rows}", fast=True)
        moved = 2 * SHAPE.product_parameters + 4 * LAYERS * rows * CONTEXT * K * D
        floor = 1e6 * moved / ceilings.bytes_per_second
        label = f"ops of a step, {rows} requests"
        yield row(label, exact, "us")
        yield row(f"{label}: floor / time", floor / exact, "ratio", 0.7 if judged else None)
        bar = 1.6 if judged else None
        yield row(f"{label}: exact / fast", exact / fast, "ratio", bar, at_most=True)
    tree = step_us(times, 72, "tree 8x(1+8)", fast=False)
    plain = step_us(times, 8, "decode 8", fast=False)
    bar = 1.15 if judged else None
    yield row("8 requests: 8 draft nodes each / none", tree / plain, "ratio", bar, at_most=True)


@torch.inference_mode()
def timed_rows(options: argparse.Namespace, kind: str) -> Iterator[Row]:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), flush=True)
    times: Times = {}
    ceilings = Ceilings.of(torch.device("cuda"), options.floors)
    if kind == "recurrent":
        yield from measure(recurrent_cases(QWEN3_NEXT), ceilings, times)
        return
    yield from measure(step_cases(), ceilings, times)
    yield from step_rows(times, ceilings)


@torch.inference_mode()
def sweep_rows() -> Iterator[Row]:
    torch.manual_seed(0)
    yield from sweep(LINEARS | HEAD)


def rows_without_gpu() -> Iterator[Row]:
    print("no GPU here: nothing was run")
    for count in DECODE:
        yield not_run(f"ops of a step, {count} requests: floor / time", "ratio", 0.7)


def parts(options: argparse.Namespace) -> Parts:
    without: dict[str, Part] = {"padding": partial(padding, LINEARS | HEAD)}
    if not torch.cuda.is_available():
        return without if "padding" in options.ops else {"no GPU": rows_without_gpu}
    every: dict[str, Part] = {
        kind: partial(timed_rows, options, kind) for kind in OPS if kind in options.ops
    }
    if "padding" in options.ops:
        every |= without
    if "sweep" in options.ops:
        every["sweep"] = sweep_rows
    return every


def make_command() -> Command:
    command = Command(__doc__)
    add_floors_option(command)
    help = (
        "those of a step, of recurrent layers; or which tiles matmul should have, and how much "
        "they compute beyond what is wanted, which needs no GPU"
    )
    command.option("--ops", OPS, nargs="+", choices=[*OPS, *TILES], help=help)
    return command


if __name__ == "__main__":
    make_command().run("GPU ops at the 8B shape", parts)
