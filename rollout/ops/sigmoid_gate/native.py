"""A sigmoid gate on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["sigmoid_gate_", "supports"]


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> None:
    if x.dim() == 2:
        x, gate = x.unsqueeze(1), gate.unsqueeze(1)
    cpu.sigmoid_gate(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        x.shape,
        x.stride(),
        gate.data_ptr(),
        gate.shape,
        gate.stride(),
        torch.get_num_threads(),
    )
