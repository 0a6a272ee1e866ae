"""The engine's learned costs and estimates, parsed from a log; incomplete ones are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.report.run import number

NUM_TENTHS = 10
_NEURAL = {
    "eagle": "EAGLE draft model",
    "eagle3": "EAGLE-3 draft model",
    "mtp": "MTP draft model",
}
SOURCES = {
    "group": "other samples of the prompt",
    "live": "rollouts of other prompts",
    "external": "external corpora",
    "gap": "other samples, past one different token",
    **_NEURAL,
    **{f"ngram+{name}": f"corpus and {words} alike" for name, words in _NEURAL.items()},
}
"""Sources of drafts in words, by the names that the engine gives them."""


@dataclass(frozen=True, slots=True)
class LearnedCostCurve:
    """Milliseconds of a forward with sampling, without drafting, by query rows."""

    rows_R: np.ndarray
    milliseconds_R: np.ndarray
    observations_R: np.ndarray  # weight of the measurements behind each entry


@dataclass(frozen=True, slots=True)
class Calibration:
    """Verified nodes by source and by tenths of the probability that their draft claimed."""

    sources: list[str]
    count_SK: np.ndarray
    expected_SK: np.ndarray  # sums of the claims
    accepted_SK: np.ndarray


def cost_curve(learned: Mapping[str, Any]) -> LearnedCostCurve | None:
    """The learned cost of a forward, or None."""
    cost = _part(_part(learned, "budget"), "cost")
    columns = [_numbers(cost.get(name)) for name in ("rows", "milliseconds", "observations")]
    if not len(columns[0]) or len({len(column) for column in columns}) > 1:
        return None
    return LearnedCostCurve(columns[0], columns[1], np.nan_to_num(columns[2]))


def calibration(learned: Mapping[str, Any]) -> Calibration | None:
    """The calibration, or None, also if no node was verified."""
    part = _part(_part(learned, "budget"), "calibration")
    sources = [str(each) for each in _list(part.get("sources"))]
    shape = (len(sources), NUM_TENTHS)
    count, expected, accepted = (
        _table(part.get(name), shape) for name in ("count", "expected", "accepted")
    )
    if count is None or expected is None or accepted is None:
        return None
    if not np.isfinite([count, expected, accepted]).all() or count.sum() <= 0:
        return None
    return Calibration(sources, count, expected, accepted)


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = whole.get(name)
    return part if isinstance(part, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(value: object) -> np.ndarray:
    return np.array([number(each) for each in _list(value)], dtype=np.float64)


def _table(value: object, shape: tuple[int, int]) -> np.ndarray | None:
    """A list of lists as an array, or None unless it has ``shape`` and is not empty."""
    rows = [_numbers(row) for row in _list(value)]
    if not all(shape) or len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
        return None
    return np.stack(rows)
