"""What a row's own history does to its logits: penalties and logit bias.

All of it belongs to ``logprobs``: a trainer that applies the same transforms recomputes them.
"""

from __future__ import annotations

import numpy as np
import torch

from rollout.sampling.rows import SampleRows


def changes_logits(rows: SampleRows, row: int) -> bool:
    params = rows.requests[row].params
    return params.penalizes or bool(params.logit_bias)


def apply_history_(logits_V: torch.Tensor, rows: SampleRows, row: int) -> None:
    """Apply penalties, then bias, of one row in place.

    Repetition (CTRL, Keskar et al. 2019, eq. 5 extended to negative logits by multiplication) looks
    at prompt and output; presence and frequency at output alone. Args: logits float32 [V].
    """
    request, drafted = rows.requests[row], rows.drafted[row]
    params = request.params
    if params.repetition_penalty != 1:
        seen = np.unique(np.array(request.tokens + drafted, dtype=np.int64))
        ids = torch.from_numpy(seen).to(logits_V.device)
        chosen = logits_V[ids]
        penalty = float(params.repetition_penalty)
        logits_V[ids] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        output = request.tokens[request.prompt_len - request.partial_len :] + drafted
        unique, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        ids = torch.from_numpy(unique).to(logits_V.device)
        cost = params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
        logits_V[ids] -= torch.from_numpy(cost.astype(np.float32)).to(logits_V.device)
    for token, bias in params.logit_bias.items():
        logits_V[token] += float(bias)
