"""The gates of a gated delta rule in plain torch (Dao and Gu 2024 for the decay)."""

from __future__ import annotations

import torch


def delta_gates(
    a_TG: torch.Tensor, b_TG: torch.Tensor, A_log_G: torch.Tensor, dt_bias_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    step_TG = torch.nn.functional.softplus(a_TG.float() + dt_bias_G.float())
    return -A_log_G.float().exp() * step_TG, b_TG.float().sigmoid()
