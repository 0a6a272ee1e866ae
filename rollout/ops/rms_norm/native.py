"""RMS normalisation on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["add_rms_norm", "rms_norm", "supports"]


def rms_norm(
    x: torch.Tensor, weight_E: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    if x.dim() == 3:
        shape, strides = x.shape, x.stride()
    elif x.dim() == 2:
        shape, strides = (x.shape[0], 1, x.shape[1]), (x.stride(0), 0, 1)
    else:
        return rms_norm(x.reshape(-1, x.shape[-1]), weight_E, eps, unit_offset).view(x.shape)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    cpu.rms_norm(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        shape,
        strides,
        weight_E.data_ptr(),
        weight_E.numel(),
        eps,
        unit_offset,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> torch.Tensor:
    out_TE = torch.empty_like(residual_TE)  # contiguous, as columns are adjacent
    cpu.add_rms_norm(
        DTYPE_CODES[x_TE.dtype],
        x_TE.data_ptr(),
        x_TE.shape,
        x_TE.stride(),
        residual_TE.data_ptr(),
        residual_TE.shape,
        residual_TE.stride(),
        weight_E.data_ptr(),
        weight_E.numel(),
        eps,
        unit_offset,
        out_TE.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TE
