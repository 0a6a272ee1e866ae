"""Gated activations in plain torch (Shazeer 2020; the clamped one: gpt-oss, 2025), GELU in
float64."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    return (silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)


def gelu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = gate_up_T2F.double().chunk(2, dim=-1)
    return (gelu(gate_TF, approximate="tanh") * up_TF).to(gate_up_T2F.dtype)


def clamped_silu_mul(gate_up_T2F: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    return (gate_TF * torch.sigmoid(alpha * gate_TF) * (up_TF + 1)).to(gate_up_T2F.dtype)
