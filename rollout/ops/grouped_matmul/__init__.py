"""The product of each row with its own experts' weights.

Legend: M rows of input, S pairs of a row and an expert (a multiple of M), N experts, I input,
O output features.
"""

from __future__ import annotations

from collections.abc import Set

import torch

from rollout.ops import gpu
from rollout.ops.grouped_matmul import reference
from rollout.ops.grouped_matmul.groups import RowGroups
from rollout.ops.matmul.tiles import Tile

__all__ = ["RowGroups", "grouped_matmul"]


def grouped_matmul(
    x_MI: torch.Tensor,
    weights_NOI: torch.Tensor,
    groups: RowGroups,
    left_out: Set[Tile] = frozenset(),
) -> torch.Tensor:
    """``y[p] = x[p // (S / M)] @ weights[n].T`` for the pairs p of each expert n: [S, O].

    x has one row for all of a row's experts, or one for each pair. All tensors have one dtype; a
    sum is float32 and rounded once; rows of x may be strided. On a GPU y[p] has the bits that
    `ops.matmul` gives for x's row and that weight, whatever other rows there are. On the CPU this
    is only the plain definition; exact mode there uses packed products
    (`rollout.models.layers.grouped_linear`).

    ``left_out``: tiles that a GPU must not use.
    """
    if gpu.supports(x_MI, weights_NOI):
        from rollout.ops.grouped_matmul import triton

        return triton.grouped_matmul(x_MI, weights_NOI, groups, left_out)
    return reference.grouped_matmul(x_MI, weights_NOI, groups)
