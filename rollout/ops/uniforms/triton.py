"""Counter-based noise on a GPU: integers only, so the bits are the same on every device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 128


def uniforms(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    rows = len(seeds_R)
    out_R = torch.empty(rows, dtype=torch.float64, device=seeds_R.device)
    if rows:
        _uniforms_kernel[(triton.cdiv(rows, _BLOCK),)](
            seeds_R.contiguous(), positions_R.contiguous(), out_R, rows,
            BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_R


@triton.jit
def _mix(x):
    """SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["rows"])
def _uniforms_kernel(seeds_ptr, positions_ptr, out_ptr, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    seed = tl.load(seeds_ptr + row, mask=row < rows, other=0).to(tl.uint64)
    position = tl.load(positions_ptr + row, mask=row < rows, other=0).to(tl.uint64)
    key = _mix(seed + golden)
    counter = _mix((position + tl.full((), 1, tl.uint64)) * golden)
    bits = _mix(_mix(key ^ counter) + key)
    tl.store(out_ptr + row, (bits >> 11).to(tl.float64) * 2.0**-53, mask=row < rows)
