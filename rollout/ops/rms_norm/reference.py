"""RMS normalisation in plain torch (Zhang and Sennrich 2019), rounded where transformers rounds."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight_E: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    x_f32 = x.float()
    normed = x_f32 * torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight_E.float())).to(x.dtype).contiguous()
    return (normed.to(x.dtype) * weight_E).contiguous()


def add_rms_norm(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> torch.Tensor:
    residual_TE += x_TE
    return rms_norm(residual_TE, weight_E, eps, unit_offset)
