"""Rotary position embedding (Su et al. 2021), rotate-half convention, and the scatter of keys and
values into their slots, in plain torch."""

from __future__ import annotations

import torch


def rotary_store_kv_(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor | None,
    positions_T: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor | None,
    slots_T: torch.Tensor,
) -> None:
    cos_T1r, sin_T1r = cos_sin_PR[positions_T.long()].unsqueeze(1).chunk(2, dim=-1)
    half = cos_sin_PR.shape[1] // 2
    for x in (q_THD, k_TKD):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat(
            (first * cos_T1r - second * sin_T1r, second * cos_T1r + first * sin_T1r), dim=-1
        )
        x[..., : 2 * half] = turned.to(x.dtype)
    slots_T = slots_T.long()
    k_pool_SKD[slots_T] = k_TKD
    if v_TKD is not None and v_pool_SKD is not None:
        v_pool_SKD[slots_T] = v_TKD
