"""Gated RMS normalisation in plain torch, rounded where transformers rounds."""

from __future__ import annotations

import torch

from rollout.ops.rms_norm import reference


def gated_rms_norm(
    x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> torch.Tensor:
    normed = reference.rms_norm(x_TGV, weight_V, eps)
    return (normed * torch.nn.functional.silu(gate_TGV.float())).to(x_TGV.dtype)
