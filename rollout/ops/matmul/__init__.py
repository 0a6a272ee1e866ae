"""The row-invariant matrix product. M rows, I input, O output features."""

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
    """``x @ weight.T + bias``, a new contiguous [M, O]; all tensors have one dtype.

    A sum is float32 and rounded once. On a GPU a row has the same bits whatever the other rows are.
    On the CPU this is only the plain definition; exact mode there uses packed products
    (`rollout.models.layers.linear`). Rows may be strided.

    ``left_out``: tiles that a GPU must not use.
    """
    if gpu.supports(x_MI, weight_OI):
        from rollout.ops.matmul import triton

        return triton.matmul(x_MI, weight_OI, bias_O, left_out)
    return reference.matmul(x_MI, weight_OI, bias_O)
