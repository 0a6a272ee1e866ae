"""The gate of a SwiGLU MLP on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops.extension import supports
from rollout.ops.glu.native import gated_mul

__all__ = ["silu_mul", "supports"]


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    return gated_mul(0, gate_up_T2F)
