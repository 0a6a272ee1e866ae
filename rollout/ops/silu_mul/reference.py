"""The gate of a SwiGLU MLP in plain torch (Shazeer 2020)."""

from __future__ import annotations

import torch


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)
