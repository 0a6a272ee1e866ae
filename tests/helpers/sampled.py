"""Samples of rows without trees."""

from __future__ import annotations

import torch

from rollout.sampling.rows import SampleRows
from rollout.sampling.sampler import Sampled, Sampler


def sample(logits_RV: torch.Tensor, rows: SampleRows) -> Sampled:
    """Sample every row."""
    return Sampler(logits_RV, rows).read()
