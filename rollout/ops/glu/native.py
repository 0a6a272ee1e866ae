"""Gated activations on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["clamped_silu_mul", "gelu_mul", "silu_mul", "supports"]

_SILU, _GELU, _CLAMPED_SILU = 0, 1, 2  # enum Activation of the extension


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    return _gated_mul(_SILU, gate_up_T2F)


def gelu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    return _gated_mul(_GELU, gate_up_T2F)


def clamped_silu_mul(gate_up_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return _gated_mul(_CLAMPED_SILU, gate_up_T2F, alpha, limit)


def _gated_mul(
    activation: int, gate_up_T2F: torch.Tensor, alpha: float = 1.0, limit: float = 0.0
) -> torch.Tensor:
    rows, width = gate_up_T2F.shape
    out_TF = torch.empty((rows, width // 2), dtype=gate_up_T2F.dtype)
    cpu.gated_mul(
        DTYPE_CODES[gate_up_T2F.dtype],
        activation,
        alpha,
        limit,
        gate_up_T2F.data_ptr(),
        gate_up_T2F.shape,
        gate_up_T2F.stride(),
        out_TF.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TF
