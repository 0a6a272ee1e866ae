"""Attention over latents (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): all query heads read one key
per token, most of which is the token's value too.

Legend: T query rows, H query heads, D key dim, R rotated dims, L latent dim (D - R), S slots.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.latent_attention import reference
from rollout.ops.paged_attention import native
from rollout.ops.paged_attention.plan import AttentionPlan


def latent_attention(
    q_THD: torch.Tensor,
    pool_S1D: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    rotary_dim: int,
) -> torch.Tensor:
    """``softmax(q k^T * scale) k[R:]`` for every query row over its keys by the plan: [T, H, L].

    ``rotary_dim``: R. Otherwise as `paged_attention`. On the CPU it is that op, and the keys behind
    their rotated dims are its values.
    """
    if gpu.supports(q_THD, pool_S1D):
        from rollout.ops.latent_attention import triton

        return triton.latent_attention(q_THD, pool_S1D, plan, scale, rotary_dim)
    if native.supports(q_THD, pool_S1D):
        values_S1L = pool_S1D[..., rotary_dim:]
        return native.paged_attention(q_THD, pool_S1D, values_S1L, plan, scale)
    return reference.latent_attention(q_THD, pool_S1D, plan, scale, rotary_dim)
