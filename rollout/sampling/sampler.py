"""Logits to tokens and logprobs, each row a pure function of its logits, params, seed and position.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.sampling import device_sampler, host_sampler
from rollout.sampling.rows import SampleRows
from rollout.sampling.sampled import Sampled


def sample(logits_RV: torch.Tensor, rows: SampleRows) -> Sampled:
    """Sample every row.

    Args: logits [R, V] as the model gave them, any float dtype. A row that is no distribution (NaN,
    +inf, nothing above -inf) gives token -1.
    """
    if gpu.runs_on(logits_RV.device):
        return device_sampler.sample(logits_RV, rows)
    return host_sampler.sample(logits_RV, rows)


def score(logits_RV: torch.Tensor, rows: SampleRows, token_ids: list[int]) -> Sampled:
    """Report what `sample` would have, had it drawn ``token_ids``; bit for bit."""
    if gpu.runs_on(logits_RV.device):
        return device_sampler.score(logits_RV, rows, token_ids)
    return host_sampler.score(logits_RV, rows, token_ids)
