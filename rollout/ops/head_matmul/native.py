"""The product of each head's rows with the head's own weight, on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports

__all__ = ["head_matmul", "supports"]


def head_matmul(x_THI: torch.Tensor, weights_HIO: torch.Tensor, out_THO: torch.Tensor) -> None:
    cpu.head_matmul(
        DTYPE_CODES[x_THI.dtype],
        x_THI.data_ptr(),
        x_THI.shape,
        x_THI.stride(),
        weights_HIO.data_ptr(),
        weights_HIO.shape,
        out_THO.data_ptr(),
        out_THO.shape,
        out_THO.stride(),
        torch.get_num_threads(),
    )
