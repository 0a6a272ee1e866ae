"""Trees grown on a GPU: a program per tree. The same numbers as the reference's.

Legend: see `rollout.ops.tree_growth`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.ops.tree_growth.arrays import TreeArrays


def add(arrays: TreeArrays, level: int, tokens_GFW: torch.Tensor, probs_GFW: torch.Tensor) -> None:
    trees, rows, width = probs_GFW.shape
    if trees:
        _add_kernel[(trees,)](
            tokens_GFW, probs_GFW, arrays.sizes_G, arrays.floor_1, arrays.row_probs_GW,
            arrays.is_row_GW, arrays.tokens_GC, arrays.probs_GC, *tokens_GFW.stride()[:2],
            *probs_GFW.stride()[:2], arrays.tokens_GC.shape[1], arrays.first_candidate(level),
            ROOTS=level == 0, WIDTH=width, CHILDREN=rows * width,
            BLOCK=triton.next_power_of_2(rows * width), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def expand(arrays: TreeArrays, level: int) -> None:
    trees = len(arrays.sizes_G)
    if trees:
        last = arrays.first_candidate(level)
        _expand_kernel[(trees,)](
            *(each for each in arrays if each is not arrays.floor_1), arrays.tokens_GC.shape[1],
            arrays.node_tokens_GN.shape[1], arrays.first_candidate(level - 1), last, level,
            WIDTH=arrays.topk, BLOCK=triton.next_power_of_2(last), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _add_kernel(
    tokens_ptr, probs_ptr, sizes_ptr, floor_ptr, row_probs_ptr, is_row_ptr, out_tokens_ptr,
    out_probs_ptr, token_tree_stride, token_row_stride, prob_tree_stride, prob_row_stride,
    candidates, first, ROOTS: tl.constexpr, WIDTH: tl.constexpr, CHILDREN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    child = tl.arange(0, BLOCK)
    is_child = child < CHILDREN
    row, column = child // WIDTH, child % WIDTH
    token_ptr = tokens_ptr + tree * token_tree_stride + row * token_row_stride + column
    prob_ptr = probs_ptr + tree * prob_tree_stride + row * prob_row_stride + column
    token = tl.load(token_ptr, mask=is_child, other=0)
    prob = tl.load(prob_ptr, mask=is_child, other=0.0)
    if ROOTS:
        is_one = is_child & (tl.load(sizes_ptr + tree) > 0)
    else:
        row += tree * WIDTH
        prob *= tl.load(row_probs_ptr + row, mask=is_child, other=0.0)
        is_one = is_child & tl.load(is_row_ptr + row, mask=is_child, other=0).to(tl.int1)
    is_one &= prob >= tl.load(floor_ptr)
    out = tree * candidates + first + child
    tl.store(out_tokens_ptr + out, token.to(tl.int32), mask=is_child)
    tl.store(out_probs_ptr + out, tl.where(is_one, prob, -1.0), mask=is_child)


@triton.jit(do_not_specialize=["first", "last", "level"])
def _expand_kernel(
    sizes_ptr, depths_ptr, tokens_ptr, probs_ptr, node_tokens_ptr, node_parents_ptr,
    node_masks_ptr, is_node_ptr, node_candidates_ptr, row_probs_ptr, is_row_ptr, candidates, nodes,
    first, last, level, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    candidate = tl.arange(0, BLOCK)
    prob = tl.load(probs_ptr + tree * candidates + candidate, mask=candidate < last, other=-2.0)
    left = tl.where(candidate >= first, prob, -3.0)  # of the last level, not yet chosen
    size, deeper = tl.load(sizes_ptr + tree), tl.load(depths_ptr + tree) > level
    first_node = WIDTH * (level - 1)
    for w in range(WIDTH):
        best = tl.max(left, axis=0)
        chosen = tl.min(tl.where(left == best, candidate, BLOCK), axis=0)
        left = tl.where(candidate == chosen, -3.0, left)
        is_before = (prob > best) | ((prob == best) & (candidate < chosen))
        rank = tl.sum(is_before.to(tl.int32), axis=0)
        is_one = (best >= 0) & (rank < size - 1) & deeper
        token = tl.load(tokens_ptr + tree * candidates + chosen)
        parent = tl.where(level == 1, -1, first_node - WIDTH + (chosen - first) // WIDTH)
        has_parent = is_one & (level > 1)
        above = tl.load(node_masks_ptr + tree * nodes + parent, mask=has_parent, other=1)
        own = tl.full((), 1, tl.int64) << (first_node + w + 1).to(tl.int64)
        node, row = tree * nodes + first_node + w, tree * WIDTH + w
        tl.store(node_tokens_ptr + node, tl.where(is_one, token, 0).to(tl.int64))
        tl.store(node_parents_ptr + node, parent.to(tl.int64))
        tl.store(node_masks_ptr + node, above | own)
        tl.store(is_node_ptr + node, is_one)
        tl.store(node_candidates_ptr + node, tl.where(is_one, chosen, -1))
        tl.store(row_probs_ptr + row, best)
        tl.store(is_row_ptr + row, is_one)
