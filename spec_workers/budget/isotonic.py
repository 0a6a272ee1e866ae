"""The nearest sequence that never falls."""

from __future__ import annotations

from collections.abc import Sequence


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence with the least weighted squared distance from ``values``.

    Pool adjacent violators (Barlow et al. 1972): neighbours in the wrong order become their mean.
    ``weights``: > 0, like ``values``.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, before_weight, before_length = blocks.pop()
            mean = (mean * total + before * before_weight) / (total + before_weight)
            total += before_weight
            length += before_length
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]
