"""A matrix product whose rows do not depend on each other. M rows, I input, O output features."""

from __future__ import annotations

from collections.abc import Set

import torch

from rollout.ops import gpu
from rollout.ops.matmul import reference
from rollout.ops.matmul.tiles import Tile


def matmul(
    x_MI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    left_out: Set[Tile] = frozenset(),
) -> torch.Tensor:
    """``x @ weight.T + bias`` with a float32 sum and one rounding, all of one dtype.

    On a GPU a row has the same bits whatever rows are beside it and however many; on the CPU that
    is what packed products are for (`rollout.models.layers.linear`), and this is the plain
    definition. Rows may be strided. ``left_out``: tiles that a GPU is not to use. Returns a new
    contiguous [M, O].
    """
    if gpu.supports(x_MI, weight_OI):
        from rollout.ops.matmul import triton

        return triton.matmul(x_MI, weight_OI, bias_O, left_out)
    return reference.matmul(x_MI, weight_OI, bias_O)
