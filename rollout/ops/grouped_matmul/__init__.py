"""Each row times its own expert's weight.

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

    So x has a row for all of a row's experts, or one for each pair. A float32 sum and one rounding,
    all of one dtype; rows of x may be strided. On a GPU y[p] has the bits that ``ops.matmul`` gives
    x's row and that weight, whatever other rows there are and wherever they go; on the CPU that is
    what packed products are for (`rollout.models.layers.grouped_linear`), and this is the plain
    definition.
    ``left_out``: tiles that a GPU is not to use.
    """
    if gpu.supports(x_MI, weights_NOI):
        from rollout.ops.grouped_matmul import triton

        return triton.grouped_matmul(x_MI, weights_NOI, groups, left_out)
    return reference.grouped_matmul(x_MI, weights_NOI, groups)
