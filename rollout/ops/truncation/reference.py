"""Truncation in plain torch: by a sort of the likeliest tokens, and of all where those are too few.

Legend: C columns, the likeliest tokens.
"""

from __future__ import annotations

import torch

from rollout.ops.categorical import token_logprobs

_PREFIX = 1024  # most nuclei lie within the likeliest tokens: a full sort is the rare case


def truncation_threshold(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    logits_RV = logits_RV.float()
    rows, vocab = logits_RV.shape
    if not rows:
        return logits_RV.new_empty(0)
    largest_k = int(top_k_R.clamp(min=0).max())
    prefix = min(vocab, max(_PREFIX, largest_k))
    threshold_R, complete_R = _threshold_in_prefix(
        logits_RV, temperature_R, top_k_R, top_p_R, prefix
    )
    if prefix < vocab and not bool(complete_R.all()):
        others = (~complete_R).nonzero().flatten()
        threshold_R[others], _ = _threshold_in_prefix(
            logits_RV[others], temperature_R[others], top_k_R[others], top_p_R[others], vocab
        )
    scale_R = torch.where(temperature_R == 0, torch.ones_like(temperature_R), temperature_R)
    floor_R = logits_RV.amax(dim=1) + torch.log(min_p_R) * scale_R
    return torch.maximum(threshold_R, floor_R)


def _threshold_in_prefix(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    prefix: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Threshold by top_k and top_p from the ``prefix`` largest logits; whether those sufficed."""
    values_RC, indices_RC = logits_RV.topk(prefix, dim=1, sorted=True)
    rank_C = torch.arange(prefix, device=logits_RV.device)
    by_k_RC = (top_k_R[:, None] <= 0) | (rank_C < top_k_R[:, None])
    # The row's sum over the whole vocabulary hides in the logprob of its most likely token.
    best_logprob_R = token_logprobs(logits_RV, temperature_R, indices_RC[:, 0]).double()
    scale_R1 = torch.where(temperature_R == 0, 1.0, temperature_R.double())[:, None]
    log_ratio_RC = (values_RC.double() - values_RC[:, :1].double()) / scale_R1
    probs_RC = torch.where(by_k_RC, (log_ratio_RC + best_logprob_R[:, None]).exp(), 0.0)
    mass_RC = probs_RC.cumsum(dim=1)
    whole_R = torch.where(top_k_R > 0, mass_RC[:, -1], 1.0)
    # No share of the mass stands for all of it: tokens too unlikely to add to the sum stay too.
    wanted_R1 = torch.where(top_p_R < 1, top_p_R.double() * whole_R, torch.inf)[:, None]
    # A token stays if what is likelier than it has not reached p yet: the first always stays, also
    # where NaN makes all others seem to go.
    kept_RC = by_k_RC & ((mass_RC - probs_RC) < wanted_R1)
    last_R = kept_RC.sum(dim=1).clamp(min=1) - 1
    threshold_R = values_RC.gather(1, last_R[:, None]).squeeze(1)
    off_R = (top_k_R <= 0) & (top_p_R >= 1)
    threshold_R = torch.where(off_R, float("-inf"), threshold_R)
    complete_R = off_R | (top_k_R > 0) | (mass_RC[:, -1] >= wanted_R1[:, 0])
    return threshold_R, complete_R
