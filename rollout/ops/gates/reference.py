"""Gates in plain torch, rounded where transformers rounds."""

from __future__ import annotations

import torch

from rollout.ops.rms_norm.reference import rms_norm


def delta_gates(
    a_TG: torch.Tensor, b_TG: torch.Tensor, A_log_G: torch.Tensor, dt_bias_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # The decay is of Dao and Gu 2024.
    step_TG = torch.nn.functional.softplus(a_TG.float() + dt_bias_G.float())
    return -A_log_G.float().exp() * step_TG, b_TG.float().sigmoid()


def gated_rms_norm(
    x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> torch.Tensor:
    normed = rms_norm(x_TGV, weight_V, eps)
    return (normed * torch.nn.functional.silu(gate_TGV.float())).to(x_TGV.dtype)


def sigmoid_gate_(x: torch.Tensor, gate: torch.Tensor) -> None:
    x.copy_(x.float() * gate.float().sigmoid())
