"""Truncation by a full sort in plain torch, float64 inside."""

from __future__ import annotations

import torch


def truncation_threshold(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    logits_RV = logits_RV.float()
    scale_R = torch.where(temperature_R == 0, 1.0, temperature_R)
    sorted_RV = logits_RV.sort(dim=1, descending=True).values
    rank_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    by_k_RV = (top_k_R[:, None] <= 0) | (rank_V < top_k_R[:, None])
    probs_RV = torch.softmax(sorted_RV.double() / scale_R.double()[:, None], dim=1) * by_k_RV
    mass_RV = probs_RV.cumsum(dim=1)
    wanted_R1 = top_p_R.double()[:, None] * mass_RV[:, -1:]
    # A token stays if more likely ones have not reached p yet; the first one always stays.
    enough_RV = (mass_RV - probs_RV >= wanted_R1) & (top_p_R < 1)[:, None]
    last_R = (by_k_RV & ~enough_RV).sum(dim=1).clamp(min=1) - 1
    threshold_R = sorted_RV.gather(1, last_R[:, None]).squeeze(1)
    off_R = (top_k_R <= 0) & (top_p_R >= 1)
    floor_R = sorted_RV[:, 0] + min_p_R.log() * scale_R
    return torch.maximum(threshold_R.masked_fill(off_R, float("-inf")), floor_R)
