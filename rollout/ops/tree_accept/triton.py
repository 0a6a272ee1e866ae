"""Tree acceptance on a GPU: one program per entry looks at all of its nodes at once.

A node is on the accepted path if it and all its ancestors equal the target's samples at their
parents, and no earlier sibling of any of them does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NODES = 64  # one more than an entry has draft nodes: the bits of a mask


def accept(
    sampled_R: torch.Tensor,
    row_offsets_B1: torch.Tensor,
    tokens_N: torch.Tensor,
    parents_N: torch.Tensor,
    masks_N: torch.Tensor,
    node_offsets_B1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    entries = len(row_offsets_B1) - 1
    paths_BD = torch.empty(entries, _NODES - 1, dtype=torch.int32, device=sampled_R.device)
    lengths_B = torch.empty(entries, dtype=torch.int32, device=sampled_R.device)
    if entries:
        _accept_kernel[(entries,)](
            sampled_R, row_offsets_B1, tokens_N, parents_N, masks_N, node_offsets_B1, paths_BD,
            lengths_B, NODES=_NODES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return paths_BD, lengths_B


@triton.jit
def _accept_kernel(
    sampled_ptr, row_offsets_ptr, tokens_ptr, parents_ptr, masks_ptr, node_offsets_ptr, paths_ptr,
    lengths_ptr, NODES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    first = tl.load(node_offsets_ptr + entry)
    nodes = tl.load(node_offsets_ptr + entry + 1) - first
    sampled_ptr += tl.load(row_offsets_ptr + entry)
    node = tl.arange(0, NODES)
    is_node = node < nodes
    token = tl.load(tokens_ptr + first + node, mask=is_node, other=0).to(tl.int64)
    parent = tl.load(parents_ptr + first + node, mask=is_node, other=-1)
    mask = tl.load(masks_ptr + first + node, mask=is_node, other=0)
    wanted = tl.load(sampled_ptr + parent, mask=is_node, other=-1)
    # A node that differs from the sample gets a unique parent, so it is nobody's sibling.
    equal_parent = tl.where(is_node & (token == wanted), parent, -1 - node)
    earlier = (equal_parent[None, :] == equal_parent[:, None]) & (node[None, :] < node[:, None])
    is_first = (equal_parent >= 0) & (tl.sum(earlier.to(tl.int32), axis=1) == 0)

    bit = tl.where(node < NODES - 1, node + 1, 0).to(tl.int64)  # of a tree node in the masks
    one = tl.full((NODES,), 1, tl.int64)
    confirmed = tl.sum(tl.where(is_first, one << bit, 0)) | 1  # the root is
    accepted = is_first & ((mask & ~confirmed) == 0)
    depth = tl.cumsum(accepted.to(tl.int32), axis=0) - 1
    length = tl.sum(accepted.to(tl.int32))
    paths_ptr += entry * (NODES - 1)
    tl.store(paths_ptr + depth, node + 1, mask=accepted)
    tl.store(
        paths_ptr + node, tl.zeros((NODES,), tl.int32), mask=(node >= length) & (node < NODES - 1)
    )
    tl.store(lengths_ptr + entry, length)
