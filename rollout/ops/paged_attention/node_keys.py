"""The slots of draft nodes' own keys, computed once per step and read by every layer.

Legend: as in the plan; W columns, two blocks of positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.ops.entry_lookup import entry_of_row
from rollout.ops.paged_attention.plan import BLOCK, AttentionPlan, NodeKeys


def node_keys(plan: AttentionPlan) -> NodeKeys:
    """The `NodeKeys` of a plan on a GPU, made at the first layer."""
    if plan.node_keys is not None:
        return plan.node_keys
    nodes, device = plan.node_slots_N.numel(), plan.node_slots_N.device
    keys = NodeKeys(
        slots_NW=torch.empty((nodes, 2 * BLOCK), dtype=torch.int32, device=device),
        lens_N=torch.empty(nodes, dtype=torch.int32, device=device),
    )
    if nodes:
        num_entries = plan.rows_B.numel()
        _node_keys_kernel[(nodes,)](
            plan.req_to_token, plan.rows_B, plan.starts_B, plan.run_lens_B, plan.node_offsets_B1,
            plan.node_masks_N, plan.node_slots_N, keys.slots_NW, keys.lens_N,
            plan.req_to_token.stride(0), num_entries, BLOCK=BLOCK, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    plan.node_keys = keys
    return keys


@triton.jit(do_not_specialize=["num_entries"])
def _node_keys_kernel(
    table_ptr, rows_ptr, starts_ptr, run_lens_ptr, node_offsets_ptr, masks_ptr, slots_ptr,
    own_slots_ptr, own_lens_ptr, table_stride, num_entries, BLOCK: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0)
    if node >= tl.load(node_offsets_ptr + num_entries):  # belongs to no entry: a plan may be padded
        tl.store(own_lens_ptr + node, 0)
        return
    entry = entry_of_row(node_offsets_ptr, num_entries, node)
    context = tl.load(starts_ptr + entry) + tl.load(run_lens_ptr + entry)
    first = context // BLOCK * BLOCK
    left = context - first

    # Bit b + 1 of the mask is draft node b of the entry. The path's nodes, in order, are its
    # depths.
    bit = tl.arange(0, BLOCK)
    mask = tl.load(masks_ptr + node)
    on_path = ((mask >> (bit + 1).to(tl.int64)) & 1).to(tl.int32)
    on_path = tl.where(bit < BLOCK - 1, on_path, 0)  # bits 1 to 63
    column_of = tl.where(on_path > 0, left + tl.cumsum(on_path, axis=0) - 1, -1)
    length = left + tl.sum(on_path)
    slots_ptr += tl.load(node_offsets_ptr + entry)
    path_slot = tl.load(slots_ptr + bit, mask=on_path > 0, other=0)

    column = tl.arange(0, 2 * BLOCK)
    table_ptr += tl.load(rows_ptr + entry).to(tl.int64) * table_stride + first
    slot = tl.load(table_ptr + column, mask=column < left, other=0)
    chosen = column_of[None, :] == column[:, None]
    slot += tl.sum(tl.where(chosen, path_slot[None, :], 0), axis=1)
    own_slots_ptr += node.to(tl.int64) * (2 * BLOCK)
    tl.store(own_slots_ptr + column, slot, mask=column < length)
    tl.store(own_lens_ptr + node, length)
