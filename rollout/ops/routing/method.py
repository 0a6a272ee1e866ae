"""DeepSeek's variants of top-k routing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Group-limited routing (DeepSeek-AI 2024, DeepSeek-V2 and DeepSeek-V3).

    Experts form ``count`` groups of consecutive ones. Only those of the ``chosen`` best groups can
    be chosen: by each group's largest score, or with ``sigmoid`` by the sum of its two largest.
    """

    sigmoid: bool = False  # scores are sigmoids of the logits, not their softmax
    count: int = 1
    chosen: int = 1
    factor: float = 1.0  # scales the weights in the end


PLAIN = Groups()
"""A softmax, no groups."""
