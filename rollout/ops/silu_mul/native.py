"""The gate of a SwiGLU MLP on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["silu_mul", "supports"]


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up_T2F.shape
    out_TF = torch.empty((rows, width // 2), dtype=gate_up_T2F.dtype)
    cpu.silu_mul(
        DTYPE_CODES[gate_up_T2F.dtype],
        gate_up_T2F.data_ptr(),
        gate_up_T2F.shape,
        gate_up_T2F.stride(),
        out_TF.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TF
