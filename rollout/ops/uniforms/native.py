"""Counter-based noise on the CPU."""

from __future__ import annotations

import torch

from rollout.ops.extension import cpu

__all__ = ["supports", "uniforms"]


def supports(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> bool:
    """Whether the compiled op takes these: on the CPU, numbers adjacent."""
    return cpu is not None and all(
        each.is_cpu and each.dtype is torch.int64 and each.is_contiguous()
        for each in (seeds_R, positions_R)
    )


def uniforms(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    out_R = torch.empty(len(seeds_R), dtype=torch.float64)
    cpu.uniforms(
        seeds_R.data_ptr(),
        seeds_R.numel(),
        positions_R.data_ptr(),
        positions_R.numel(),
        out_R.data_ptr(),
    )
    return out_R
