"""Attention of draft rows: over the rows of a first pass, and over the row's own chain.

The pattern of EAGLE-3's training-time test (Li et al. 2025). A row of an unrolled step stands where
a row of the first pass stands, `step` tokens further on; of the first pass it sees what that row
saw, and of the later passes only what led to itself.

Legend: R rows, L rows of the first pass, S links of a chain, H query heads, K kv heads, G query
heads of a kv head, C channels of a head, P positions.
"""

from __future__ import annotations

import torch


def attend(
    q_RHC: torch.Tensor,
    k_LKC: torch.Tensor,
    v_LKC: torch.Tensor,
    visible_R: torch.Tensor,
    chain: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Rows of one sequence. Row r sees the first ``visible_R[r]`` keys of L, and of each link of
    ``chain``, keys and values [R, K, C], row r alone. Returns [R, H * C]."""
    rows, heads, channels = q_RHC.shape
    kv_heads, length = k_LKC.shape[1], len(k_LKC)
    q_RKGC = q_RHC.unflatten(1, (kv_heads, -1))
    scores_KRGL = torch.matmul(
        q_RKGC.transpose(0, 1).flatten(1, 2), k_LKC.permute(1, 2, 0)
    ).unflatten(1, (rows, -1))
    hidden_RL = torch.arange(length, device=q_RHC.device) >= visible_R[:, None]
    scores_KRGL = scores_KRGL.masked_fill(hidden_RL[None, :, None], float("-inf"))
    links = [
        (q_RKGC * k_RKC[:, :, None]).sum(-1, keepdim=True).transpose(0, 1) for k_RKC, _ in chain
    ]
    scores = torch.cat([scores_KRGL, *links], dim=-1).float() * channels**-0.5
    weights = scores.softmax(-1).to(q_RHC.dtype)
    attended_KRGC = torch.matmul(
        weights[..., :length].flatten(1, 2), v_LKC.transpose(0, 1)
    ).unflatten(1, (rows, -1))
    for link, (_, v_RKC) in enumerate(chain):
        attended_KRGC = attended_KRGC + (
            weights[..., length + link, None] * v_RKC.transpose(0, 1)[:, :, None]
        )
    return attended_KRGC.transpose(0, 1).reshape(rows, heads * channels)


def rotate(
    x_RHC: torch.Tensor, positions_R: torch.Tensor, cos_sin_PC: torch.Tensor
) -> torch.Tensor:
    """Rotary position embedding, rotate-half convention; a new tensor in the dtype of ``x``."""
    cos_R1c, sin_R1c = cos_sin_PC[positions_R].unsqueeze(1).chunk(2, dim=-1)
    first, second = x_RHC.float().chunk(2, dim=-1)
    turned = (first * cos_R1c - second * sin_R1c, second * cos_R1c + first * sin_R1c)
    return torch.cat(turned, dim=-1).to(x_RHC.dtype)
