"""A matrix product in plain torch: float32 inside."""

from __future__ import annotations

import torch


def matmul(
    x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    y_MO = x_MI.float() @ weight_OI.float().t()
    if bias_O is not None:
        y_MO += bias_O.float()
    return y_MO.to(x_MI.dtype)
