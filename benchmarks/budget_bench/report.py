"""What is printed beside the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rollout.engine.metrics import EngineMetrics

_PARTS = ("forward", "draft", "sample", "schedule")


def shares(metrics: EngineMetrics) -> str:
    """Where an engine's time went."""
    return ", ".join(
        f"{part} {getattr(metrics, f'{part}_ms') / metrics.total_ms:.1%}" for part in _PARTS
    )


def describe(metrics: Mapping[str, EngineMetrics]) -> str:
    """Shares of time of each, with accepted and verified nodes of those that draft."""
    parts = []
    for name, own in metrics.items():
        drafts = ""
        if own.drafted:
            forwards = own.target_forwards
            drafts = (
                f", accept length {own.accept_length:.2f}, "
                f"{own.drafted / forwards:.2f} nodes/request verified"
            )
        parts.append(f"{name} {shares(own)}{drafts}")
    return "; ".join(parts)


def pairs(before: Sequence[float], after: Sequence[float]) -> str:
    """Every pair's times and ratio, for whoever doubts the median."""
    return "pairs " + ", ".join(
        f"{slow:.2f}/{fast:.2f} s = {slow / fast:.3f}"
        for slow, fast in zip(before, after, strict=True)
    )


def spread(lengths: Sequence[int], limit: int) -> str:
    """How widely rollout lengths differ."""
    tenth, half, most = np.quantile(lengths, (0.1, 0.5, 0.9))
    at_limit = sum(length == limit for length in lengths)
    return (
        f"lengths {min(lengths)} to {max(lengths)}, deciles {tenth:.0f} / {half:.0f} / {most:.0f}, "
        f"{at_limit} of {len(lengths)} at the limit"
    )
