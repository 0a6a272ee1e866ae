"""Attention of a step's query rows over the KV slots, for causal runs and draft trees.

Legend: T query rows, H query heads, K kv heads, D head_dim, S slots.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.paged_attention import native, reference
from rollout.ops.paged_attention.plan import PLAIN, AttentionPlan, AttentionVariant

__all__ = ["PLAIN", "AttentionPlan", "AttentionVariant", "paged_attention"]


def paged_attention(
    q_THD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> torch.Tensor:
    """``softmax(q k^T * scale) v`` for every query row over its keys by the plan.

    The variant may leave out keys before a window, cap scores and add sinks.
    The step's own keys and values must be in the pools already. Query head h reads kv head
    h // (H / K). All tensors have one dtype; computed in float32, rounded once. Padding rows give
    zeros. Returns a new contiguous [T, H, D]. Raises ValueError if the plan contradicts itself or
    names a row or slot that does not exist; on a GPU nothing checks that.
    """
    group = q_THD.shape[1] // k_pool_SKD.shape[1]
    if gpu.supports(q_THD, k_pool_SKD, v_pool_SKD) and group <= 64:
        from rollout.ops.paged_attention import triton

        return triton.paged_attention(q_THD, k_pool_SKD, v_pool_SKD, plan, scale, variant)
    if native.supports(q_THD, k_pool_SKD, v_pool_SKD):
        return native.paged_attention(q_THD, k_pool_SKD, v_pool_SKD, plan, scale, variant)
    return reference.paged_attention(q_THD, k_pool_SKD, v_pool_SKD, plan, scale, variant)
