"""Options of a layer's attention beside ``softmax(q k^T * scale) v``."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionVariant:
    """A layer's options, the same in every step.

    window: a row sees its last ``window`` keys, itself included (Beltagy et al. 2020); None: all.
    soft_cap: scaled scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, 2024); None: they
        stay.
    sinks_H: float32, contiguous; a score per head that takes part in the softmax without a value
        (gpt-oss, 2025); None: there are none.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks_H: torch.Tensor | None = None


PLAIN = AttentionVariant()
