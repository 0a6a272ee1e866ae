"""The product of a few rows with a packed weight in plain torch."""

from __future__ import annotations

import torch

from rollout.ops.panels import reference as panels


def panel_matmul(
    x_MI: torch.Tensor,
    panels_PUL: torch.Tensor,
    out_features: int,
    bias_O: torch.Tensor | None,
    sum_block: int,
) -> torch.Tensor:
    weight_OI = torch.empty(out_features, x_MI.shape[1], dtype=panels_PUL.dtype)
    panels.read_panels(panels_PUL, 0, weight_OI)
    y_MO = torch.zeros(x_MI.shape[0], out_features)
    for x_MB, weight_OB in zip(
        x_MI.split(sum_block, 1), weight_OI.split(sum_block, 1), strict=True
    ):
        y_MO += x_MB.float() @ weight_OB.float().T
    if bias_O is not None:
        y_MO += bias_O.float()
    return y_MO.to(x_MI.dtype)
