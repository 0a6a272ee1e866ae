"""Rotary position embedding in plain torch (Su et al. 2021), rotate-half convention."""

from __future__ import annotations

import torch


def rotary_(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor
) -> None:
    cos_T1r, sin_T1r = cos_sin_PR[positions_T.long()].unsqueeze(1).chunk(2, dim=-1)
    half = cos_sin_PR.shape[1] // 2
    for x in (q_THD, k_TKD):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat(
            (first * cos_T1r - second * sin_T1r, second * cos_T1r + first * sin_T1r), dim=-1
        )
        x[..., : 2 * half] = turned.to(x.dtype)
