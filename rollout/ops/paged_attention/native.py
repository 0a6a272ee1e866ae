"""Paged attention on CPU tensors.

The compiled op reads the plan as a schedule of tiles. The first layer of a step makes it and stores
it in the plan for the others.
"""

from __future__ import annotations

import torch

from rollout.ops.extension import DTYPE_CODES, cpu, supports
from rollout.ops.paged_attention.plan import PLAIN, AttentionPlan, AttentionVariant

__all__ = ["paged_attention", "supports"]

_NO_WINDOW = 1 << 62


def paged_attention(
    q_THD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKV: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> torch.Tensor:
    """Values may have fewer dims than keys: [T, H, V]."""
    q_shape, pool_shape = q_THD.shape, k_pool_SKD.shape
    if plan.schedule is None or not plan.schedule.fits(q_shape, pool_shape):
        plan.schedule = cpu.AttentionSchedule(
            plan.req_to_token.data_ptr(),
            plan.req_to_token.shape,
            plan.req_to_token.stride(0),
            plan.rows_B.numel(),
            plan.node_slots_N.numel(),
            plan.rows_B.data_ptr(),
            plan.q_offsets_B1.data_ptr(),
            plan.starts_B.data_ptr(),
            plan.run_lens_B.data_ptr(),
            plan.node_offsets_B1.data_ptr(),
            plan.node_masks_N.data_ptr(),
            plan.node_slots_N.data_ptr(),
            q_shape,
            pool_shape,
        )
    out_THV = q_THD.new_empty((*q_shape[:2], v_pool_SKV.shape[2]))
    cpu.paged_attention(
        plan.schedule,
        DTYPE_CODES[q_THD.dtype],
        q_THD.data_ptr(),
        q_shape,
        q_THD.stride(),
        pool_shape,
        k_pool_SKD.data_ptr(),
        k_pool_SKD.stride(),
        v_pool_SKV.data_ptr(),
        v_pool_SKV.shape,
        v_pool_SKV.stride(),
        scale,
        _NO_WINDOW if variant.window is None else variant.window,
        variant.soft_cap or 0.0,
        0 if variant.sinks_H is None else variant.sinks_H.data_ptr(),
        0 if variant.sinks_H is None else variant.sinks_H.numel(),
        out_THV.data_ptr(),
        torch.get_num_threads(),
    )
    return out_THV
