"""Trees grown and chosen on the CPU: the same numbers as the reference's.

Legend: see `rollout.ops.tree_growth`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops.extension import cpu
from rollout.ops.tree_growth.arrays import TreeArrays


def is_missing() -> bool:
    """Whether the ops are not compiled."""
    return cpu is None


def add(arrays: TreeArrays, level: int, tokens_GFW: torch.Tensor, probs_GFW: torch.Tensor) -> None:
    cpu.add_children(
        *_sizes_and_addresses(arrays),
        level,
        tokens_GFW.data_ptr(),
        tokens_GFW.shape,
        tokens_GFW.stride(),
        probs_GFW.data_ptr(),
        probs_GFW.stride(),
    )


def expand(arrays: TreeArrays, level: int) -> None:
    cpu.expand_trees(*_sizes_and_addresses(arrays), level)


def _sizes_and_addresses(arrays: TreeArrays) -> tuple[tuple[int, ...], list[int]]:
    trees, num_candidates = arrays.tokens_GC.shape
    sizes = (trees, arrays.topk, num_candidates, arrays.node_tokens_GN.shape[1])
    return sizes, [array.data_ptr() for array in arrays]


def choose_nodes(
    tokens_GC: NDArray[np.int32],
    probs_GC: NDArray[np.float32],
    candidates_GN: NDArray[np.int32],
    sizes_G: NDArray[np.int64],
    topk: int,
) -> tuple[NDArray[Any], ...]:
    """See `rollout.ops.tree_growth.ChosenNodes`."""
    count = int(sizes_G.sum())
    offsets_G1 = np.empty(len(sizes_G) + 1, dtype=np.int64)
    tokens_N, parents_N, depths_N = np.empty((3, count), dtype=np.int32)
    masks_N, probs_N = np.empty(count, dtype=np.uint64), np.empty(count, dtype=np.float32)
    cpu.choose_nodes(
        topk,
        tokens_GC.shape,
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
