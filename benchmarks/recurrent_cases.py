"""The ops of recurrent layers, as cases of bench_gpu_ops.py.

Every request begins with a state of its own and keeps one for each of its last row and its draft
nodes, as in the engine. A floor of the delta rule counts each state that is read or written once;
of a long run, the arithmetic of one update and two products of a state a row, in bf16.

Legend: as in the ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from op_case import Case, copies, each, normal

from rollout.ops.causal_conv import causal_conv
from rollout.ops.gated_delta_rule import gated_delta_rule
from rollout.ops.gated_delta_rule.chunked import ChunkedPlan, chunked_plan, torch_kernel
from rollout.ops.gated_delta_rule.fla import chunked_kernel
from rollout.ops.gates import delta_gates, gated_rms_norm, sigmoid_gate_
from rollout.ops.state_plan import StatePlan


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a layer, and of the steps it is timed on."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    decodes: tuple[int, ...]  # requests, a row each
    tree: tuple[int, int]  # requests, and draft nodes of each
    prefills: tuple[tuple[int, int], ...]  # requests, and rows of each

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.key_dim * self.value_dim


QWEN3_NEXT = Shape(
    key_heads=16, heads=32, key_dim=128, value_dim=128, taps=4,
    decodes=(1, 8, 32), tree=(8, 8), prefills=((1, 256), (8, 256), (1, 2048)),
)  # fmt: skip


def make_plan(requests: int, run_len: int, nodes: int = 0) -> StatePlan:
    """Request b begins with slot b + 1; its nodes are a root's children and theirs, two each."""
    rows = run_len + nodes
    parents = [row - 1 for row in range(run_len)]
    parents += [run_len - 1 if node < 2 else run_len + node // 2 - 1 for node in range(nodes)]
    kept = [0] * (run_len - 1) + [1] * (1 + nodes)
    all_parents = [
        parent + b * rows if parent >= 0 else -1 for b in range(requests) for parent in parents
    ]
    targets = torch.tensor(kept * requests, dtype=torch.int32)
    targets[targets > 0] = torch.arange(requests * (1 + nodes), dtype=torch.int32) + requests + 1
    return StatePlan(
        q_offsets_B1=torch.arange(requests + 1, dtype=torch.int32) * rows,
        sources_B=torch.arange(requests, dtype=torch.int32) + 1,
        parents_T=torch.tensor(all_parents, dtype=torch.int32),
        targets_T=targets,
    )


def recurrent_cases(shape: Shape, device: str = "cuda") -> Iterator[Case]:
    for requests in shape.decodes:
        yield from _step_cases(shape, f"decode {requests}", requests, 1, 0, device)
        yield from _row_cases(shape, requests, device)
    requests, nodes = shape.tree
    yield from _step_cases(shape, f"tree {requests}x(1+{nodes})", requests, 1, nodes, device)
    for requests, run_len in shape.prefills:
        yield from _step_cases(shape, f"run {requests}x{run_len}", requests, run_len, 0, device)


def _step_cases(
    shape: Shape, name: str, requests: int, run_len: int, nodes: int, device: str
) -> Iterator[Case]:
    host = make_plan(requests, run_len, nodes)
    tensors = {field: getattr(host, field).to(device) for field in StatePlan.__slots__}
    plan = StatePlan(**tensors)
    rows, kept = requests * (run_len + nodes), requests * (1 + nodes)
    kept_bytes = (requests + kept) * shape.state_bytes
    count = copies(kept_bytes)
    new = partial(normal, device=device)
    mixed = [new(rows, shape.channels) for _ in range(count)]
    row_bytes = 2 * rows * shape.channels

    weight = new(shape.channels, shape.taps)
    windows = [new(1 + requests + kept, shape.channels, shape.taps - 1) for _ in range(count)]
    window_bytes = 2 * (requests + kept) * shape.channels * (shape.taps - 1)
    yield Case(
        name=f"causal_conv {name}",
        ours=each(lambda x, states: causal_conv(x, weight, None, states, plan), mixed, windows),
        num_bytes=2 * row_bytes + window_bytes + 2 * weight.numel(),
    )
    del windows

    keys, values = (shape.key_heads, shape.key_dim), (shape.heads, shape.value_dim)
    widths = [keys[0] * keys[1]] * 2 + [values[0] * values[1]]
    split = [x.split(widths, dim=1) for x in mixed]
    qkv = [
        (q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, values)) for q, k, v in split
    ]
    decay, beta = (
        -torch.rand(rows, shape.heads, device=device),
        torch.rand(rows, shape.heads).to(device),
    )
    size = (1 + requests + kept, shape.heads, shape.key_dim, shape.value_dim)
    states = [new(*size, dtype=torch.float32) for _ in range(count)]

    def rule(
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        pool: torch.Tensor,
        chunks: ChunkedPlan | None = None,
    ) -> torch.Tensor:
        return gated_delta_rule(*inputs, decay, beta, pool, plan, chunks)

    plain = Case(
        name=f"gated_delta_rule {name}",
        ours=each(rule, qkv, states),
        num_bytes=kept_bytes + row_bytes + 2 * rows * shape.heads * shape.value_dim,
        flop=6 * rows * shape.heads * shape.key_dim * shape.value_dim,
    )
    yield plain
    kernels = {"chunks": torch_kernel, "fla": chunked_kernel(states[0], torch.bfloat16)}
    for kind, kernel in kernels.items():
        if kernel is None or (kind == "fla" and kernel is torch_kernel):
            continue
        chunks = chunked_plan(host, torch.device(device), kernel)
        if chunks is not None:
            chunked = each(partial(rule, chunks=chunks), qkv, states)
            yield replace(plain, name=f"{plain.name} in {kind}", ours=chunked, theirs=plain.ours)


def _row_cases(shape: Shape, rows: int, device: str) -> Iterator[Case]:
    new, heads = partial(normal, device=device), (shape.heads, shape.value_dim)
    xs, gates = ([new(rows, *heads) for _ in range(16)] for _ in range(2))
    weight = new(shape.value_dim)
    yield Case(
        name=f"gated_rms_norm {rows} rows",
        ours=each(lambda x, gate: gated_rms_norm(x, gate, weight, 1e-6), xs, gates),
        num_bytes=6 * rows * heads[0] * heads[1],
    )
    yield Case(
        name=f"sigmoid_gate {rows} rows",
        ours=each(sigmoid_gate_, xs, gates),
        num_bytes=6 * rows * heads[0] * heads[1],
    )
    ba, parameters = new(rows, 2 * shape.heads), normal(2, shape.heads, device=device)
    yield Case(
        name=f"delta_gates {rows} rows",
        ours=[partial(delta_gates, *ba.chunk(2, dim=1), *parameters)] * 16,
        num_bytes=12 * rows * shape.heads,
    )
