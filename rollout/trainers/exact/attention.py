"""Attention of whole sequences by the engine's ops.

Legend: N tokens, H query heads, K kv heads, D head dim, P positions, R rotated dims.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from rollout.ops.paged_attention import AttentionVariant, paged_attention
from rollout.ops.rotary_store_kv import rotary_store_kv_
from rollout.trainers.exact.functions import exactly
from rollout.trainers.exact.layout import SequenceLayout


def attend(
    q_NHD: torch.Tensor,
    k_NKD: torch.Tensor,
    v_NKD: torch.Tensor,
    layout: SequenceLayout,
    cos_sin_PR: torch.Tensor,
    scale: float,
    variant: AttentionVariant,
) -> torch.Tensor:
    """Rotate queries and keys, then attend causally within each sequence: [N, H, D]."""

    def op(q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> torch.Tensor:
        pools = k_NKD.new_empty(2, len(k_NKD) + 1, *k_NKD.shape[1:])
        q_NHD, k_NKD = q_NHD.clone(), k_NKD.clone()  # written to
        rotary_store_kv_(
            q_NHD, k_NKD, v_NKD, layout.positions_N, cos_sin_PR, pools[0], pools[1], layout.slots_N
        )
        return paged_attention(q_NHD, pools[0], pools[1], layout.plan, scale, variant)

    def plain(q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> torch.Tensor:
        cos_NR, sin_NR = cos_sin_PR[layout.positions_N].to(_wide(q_NHD)).chunk(2, dim=-1)
        q_NHD, k_NKD = rotated(q_NHD, cos_NR, sin_NR), rotated(k_NKD, cos_NR, sin_NR)
        found = [
            _plain_attention(q_LHD, k_LKD, v_LKD, scale, variant, layout)
            for q_LHD, k_LKD, v_LKD in zip(
                *(each.split(layout.lens) for each in (q_NHD, k_NKD, v_NKD)), strict=True
            )
        ]
        return torch.cat(found) if found else q_NHD + 0 * (k_NKD.sum() + v_NKD.sum())

    return exactly(op, plain, q_NHD, k_NKD, v_NKD)


def rotated(x_NHD: torch.Tensor, cos_NR: torch.Tensor, sin_NR: torch.Tensor) -> torch.Tensor:
    """The first 2 R dims of every head rotated, dim i with dim i + R; rounded once."""
    half = cos_NR.shape[1]
    low, high, rest = x_NHD.to(cos_NR.dtype).split((half, half, x_NHD.shape[2] - 2 * half), dim=2)
    cos, sin = cos_NR[:, None], sin_NR[:, None]
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=2)
    return turned.to(x_NHD.dtype)


def _plain_attention(
    q_LHD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    scale: float,
    variant: AttentionVariant,
    layout: SequenceLayout,
) -> torch.Tensor:
    length, group = len(q_LHD), q_LHD.shape[1] // k_LKD.shape[1]
    q_HLD, k_HLD, v_HLD = (
        each.transpose(0, 1).repeat_interleave(count, dim=0)
        for each, count in ((q_LHD, 1), (k_LKD, group), (v_LKD, group))
    )
    if variant.soft_cap is None:
        mask_LL = None
        if layout.visible_NN is not None or (variant.window or length) < length:
            mask_LL = _visible(length, variant.window, layout)
        out_HLD = scaled_dot_product_attention(
            q_HLD[None], k_HLD[None], v_HLD[None], mask_LL, is_causal=mask_LL is None, scale=scale
        )[0]
        return out_HLD.transpose(0, 1)
    wide = _wide(q_LHD)
    scores_HLL = q_HLD.to(wide) @ k_HLD.to(wide).transpose(1, 2) * (scale / variant.soft_cap)
    visible_LL = _visible(length, variant.window, layout)
    capped_HLL = (scores_HLL.tanh() * variant.soft_cap).masked_fill(~visible_LL, -torch.inf)
    return (capped_HLL.softmax(-1) @ v_HLD.to(wide)).to(q_LHD.dtype).transpose(0, 1)


def _visible(length: int, window: int | None, layout: SequenceLayout) -> torch.Tensor:
    """The keys that each row of a sequence, or of a tree, sees."""
    positions_L = layout.positions_N
    if layout.visible_NN is None:
        positions_L = torch.arange(length, device=positions_L.device)
    behind_LL = positions_L[:, None] - positions_L
    visible_LL = behind_LL >= 0 if layout.visible_NN is None else layout.visible_NN
    return visible_LL if window is None else visible_LL & (behind_LL < window)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
