"""The sum of a row's experts on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def combine_experts(
    outputs_TXE: torch.Tensor,
    weights_TX: torch.Tensor,
    shared_TE: torch.Tensor | None,
    shared_gate_T: torch.Tensor | None,
) -> torch.Tensor:
    rows, ranks, hidden = outputs_TXE.shape
    out_TE = outputs_TXE.new_empty(rows, hidden)
    if out_TE.numel():
        _combine_kernel[(rows, triton.cdiv(hidden, _BLOCK))](
            outputs_TXE, weights_TX, shared_TE, shared_gate_T, out_TE, hidden,
            0 if shared_gate_T is None else shared_gate_T.stride(0),
            RANKS=ranks, SHARED=shared_TE is not None, GATED=shared_gate_T is not None,
            BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_TE


@triton.jit
def _combine_kernel(
    outputs_ptr, weights_ptr, shared_ptr, gate_ptr, out_ptr, hidden, gate_stride,
    RANKS: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        output = tl.load(outputs_ptr + (row * RANKS + rank) * hidden + column, mask=inside)
        total += output.to(tl.float32) * tl.load(weights_ptr + row * RANKS + rank)
    if SHARED:
        shared = tl.load(shared_ptr + row * hidden + column, mask=inside).to(tl.float32)
        if GATED:
            gate = tl.load(gate_ptr + row * gate_stride).to(tl.float32)
            shared *= 1.0 / (1.0 + tl.exp(-gate))
        total += shared
    tl.store(out_ptr + row * hidden + column, total.to(out_ptr.dtype.element_ty), mask=inside)
