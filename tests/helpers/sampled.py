"""Samples of rows without trees."""

from __future__ import annotations

import torch

from rollout.sampling.rows import SampleRows
from rollout.sampling.sampler import Sampled, Sampler, TreeSampler, TreeSamples
from rollout.types import Batch, DraftTrees


def sample(logits_RV: torch.Tensor, rows: SampleRows) -> Sampled:
    """Sample every row."""
    sampler = Sampler(rows)
    sampler.take(logits_RV)
    return sampler.read()


def score(logits_RV: torch.Tensor, rows: SampleRows, token_ids: list[int]) -> Sampled:
    """What `sample` would report, had it drawn ``token_ids``."""
    sampler = Sampler(rows, chosen=token_ids)
    sampler.take(logits_RV)
    return sampler.read()


def sample_trees(batch: Batch, trees: DraftTrees, logits_RV: torch.Tensor) -> TreeSamples:
    """Samples at every root and node, and each tree's walk."""
    sampler = TreeSampler(batch, trees)
    sampler.take(logits_RV)
    return sampler.read()
