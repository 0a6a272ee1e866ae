"""The soft cap of logits in plain torch."""

from __future__ import annotations

import torch


def soft_cap_(x_RV: torch.Tensor, cap: float) -> None:
    x_RV.copy_(cap * torch.tanh(x_RV.float() / cap))
