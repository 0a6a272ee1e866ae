"""The product of rows with a packed weight in plain torch, added in the tiles' order."""

from __future__ import annotations

import torch

from rollout.ops.panels import reference as panels

_TILE_INPUTS = 32


def tile_matmul(
    x_MI: torch.Tensor, panels_PUL: torch.Tensor, out_features: int, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """The op's product, bit for bit: products of bfloat16 are exact in float32, so a fused
    multiply-add rounds as a multiplication and an addition do. Subnormal numbers are not zero here.
    """
    weight_OI = torch.empty(out_features, x_MI.shape[1], dtype=panels_PUL.dtype)
    panels.read_panels(panels_PUL, 0, weight_OI)
    y_MO = torch.zeros(x_MI.shape[0], out_features)
    for x_MT, weight_OT in zip(
        x_MI.float().split(_TILE_INPUTS, 1), weight_OI.float().split(_TILE_INPUTS, 1), strict=True
    ):
        even_MO, odd_MO = torch.zeros_like(y_MO), torch.zeros_like(y_MO)
        for sums_MO, first in ((even_MO, 0), (odd_MO, 1)):
            for x_M, weight_O in zip(x_MT[:, first::2].T, weight_OT[:, first::2].T, strict=True):
                sums_MO += x_M[:, None] * weight_O
        y_MO += even_MO + odd_MO
    if bias_O is not None:
        y_MO += bias_O.float()
    return y_MO.to(x_MI.dtype)
