"""Trees grown and chosen on the CPU: the same numbers as the reference's.

Legend: see `rollout.ops.tree_growth`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import gpu
from rollout.ops.extension import cpu

if TYPE_CHECKING:
    from rollout.ops.tree_growth import TreeGrowth, TreeNodes


def is_missing() -> bool:
    """Whether the ops are not compiled."""
    return cpu is None


def supports(sizes_G: torch.Tensor) -> bool:
    """Whether the compiled ops grow trees of this device."""
    return cpu is not None and not gpu.runs_on(sizes_G.device)


class GrowingTrees:
    """The arrays of a `TreeGrowth`, which are written in place."""

    def __init__(
        self,
        growth: TreeGrowth,
        tokens_GC: torch.Tensor,
        probs_GC: torch.Tensor,
        nodes: TreeNodes,
        candidates_GN: torch.Tensor,
        probs_GW: torch.Tensor,
        is_row_GW: torch.Tensor,
    ) -> None:
        arrays = (
            growth.sizes_G, growth.depths_G, growth.floor_1, tokens_GC, probs_GC, *nodes,
            candidates_GN, probs_GW, is_row_GW,
        )  # fmt: skip
        self._keeps, self._topk = arrays, growth.topk
        self._growth = cpu.TreeGrowth(
            len(tokens_GC),
            growth.topk,
            tokens_GC.shape[1],
            candidates_GN.shape[1],
            *(array.data_ptr() for array in arrays),
        )

    def add(self, level: int, tokens_GFW: torch.Tensor, probs_GFW: torch.Tensor) -> None:
        """Add the children of a level's rows, 0 for roots."""
        rows = self._topk if level else 1
        tokens_GFW = tokens_GFW.expand(-1, rows, -1)
        probs_GFW = probs_GFW.expand(-1, rows, -1)
        cpu.add_children(
            self._growth,
            level,
            tokens_GFW.data_ptr(),
            tokens_GFW.stride(),
            probs_GFW.data_ptr(),
            probs_GFW.stride(),
        )

    def expand(self, level: int) -> None:
        """Choose the nodes of a level, 1 for children of the roots."""
        cpu.expand_trees(self._growth, level)


def choose_nodes(
    tokens_GC: NDArray[np.int32],
    probs_GC: NDArray[np.float32],
    candidates_GN: NDArray[np.int32],
    sizes_G: NDArray[np.int64],
    topk: int,
) -> tuple[NDArray[Any], ...]:
    """See `rollout.ops.tree_growth.ChosenNodes`."""
    count, num_nodes = int(sizes_G.sum()), candidates_GN.shape[1]
    offsets_G1 = np.empty(len(sizes_G) + 1, dtype=np.int64)
    tokens_N, parents_N, depths_N = np.empty((3, count), dtype=np.int32)
    masks_N, probs_N = np.empty(count, dtype=np.uint64), np.empty(count, dtype=np.float32)
    cpu.choose_nodes(
        topk,
        tokens_GC.shape,
        num_nodes,
        tokens_GC.ctypes.data,
        _row_stride(tokens_GC),
        probs_GC.ctypes.data,
        _row_stride(probs_GC),
        candidates_GN.ctypes.data,
        _row_stride(candidates_GN),
        sizes_G.ctypes.data,
        offsets_G1.ctypes.data,
        tokens_N.ctypes.data,
        parents_N.ctypes.data,
        depths_N.ctypes.data,
        masks_N.ctypes.data,
        probs_N.ctypes.data,
    )
    arrays = (tokens_N, parents_N, depths_N, masks_N, probs_N)
    return offsets_G1, *(array[: offsets_G1[-1]] for array in arrays)


def _row_stride(array: NDArray) -> int:
    return array.strides[0] // array.itemsize
