"""Penalties and logit bias: how a row's own history changes its logits.

All of it belongs to ``logprobs``: a trainer that applies the same transforms recomputes them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.sampling.rows import SampleRows
from rollout.types import SamplingParams


def changes_logits(params: SamplingParams) -> bool:
    return params.penalizes or bool(params.logit_bias)


def apply_history_(logits_V: torch.Tensor, rows: SampleRows, row: int) -> None:
    """Apply penalties, then bias, of one row in place.

    Repetition (CTRL, Keskar et al. 2019, eq. 5 extended to negative logits by multiplication) looks
    at prompt and output; presence and frequency at output alone. Args: logits float32 [V].
    """
    request, drafted = rows.requests[row], rows.drafted[row]
    params = request.params
    if params.repetition_penalty != 1:
        ids = _ids(np.unique(np.array(request.tokens + drafted, dtype=np.int64)), logits_V)
        chosen = logits_V[ids]
        # By a number CUDA would multiply with its reciprocal, which rounds otherwise.
        penalty = logits_V.new_full((), float(params.repetition_penalty))
        _put_(logits_V, ids, torch.where(chosen > 0, chosen / penalty, chosen * penalty))
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        output = request.tokens[request.prompt_len - request.partial_len :] + drafted
        unique, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        ids = _ids(unique, logits_V)
        with np.errstate(over="ignore"):
            cost = params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
        _put_(logits_V, ids, logits_V[ids] - torch.from_numpy(cost).to(logits_V))
    if params.logit_bias:
        ids = _ids(np.array(list(params.logit_bias), dtype=np.int64), logits_V)
        bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        _put_(logits_V, ids, logits_V[ids] + torch.from_numpy(bias).to(logits_V))


def _ids(ids: NDArray[np.int64], logits_V: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids).to(logits_V.device)


def _put_(logits_V: torch.Tensor, ids: torch.Tensor, changed: torch.Tensor) -> None:
    """Keep finite values finite, however large a penalty: a row with +inf is no distribution."""
    largest = torch.finfo(torch.float32).max
    was_finite = logits_V[ids].isfinite()
    logits_V[ids] = torch.where(was_finite, changed.clamp(-largest, largest), changed)
