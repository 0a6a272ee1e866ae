"""Attention over latents in plain torch: paged attention with the keys as values."""

from __future__ import annotations

import torch

from rollout.ops.paged_attention import reference
from rollout.ops.paged_attention.plan import AttentionPlan


def latent_attention(
    q_THD: torch.Tensor,
    pool_S1D: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    rotary_dim: int,
) -> torch.Tensor:
    return reference.paged_attention(q_THD, pool_S1D, pool_S1D, plan, scale)[..., rotary_dim:]
