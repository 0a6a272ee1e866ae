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
    """Milliseconds of a forward, without drafting and sampling, by context and query rows."""

    rows_R: np.ndarray
    contexts_C: np.ndarray
    milliseconds_CR: np.ndarray
    observations_CR: np.ndarray  # weight of the measurements behind each entry; zeros if not logged


@dataclass(frozen=True, slots=True)
class Calibration:
    """Verified nodes by tenths of their estimated acceptance probability."""

    count_K: np.ndarray
    expected_K: np.ndarray  # sums of the estimates
    accepted_K: np.ndarray


@dataclass(frozen=True, slots=True)
class LearnedNodeValues:
    """Verified nodes by source and depth in the tree."""

    sources: list[str]
    depths: list[str]
    expected_SD: np.ndarray
    accepted_SD: np.ndarray


def cost_curve(learned: Mapping[str, Any]) -> LearnedCostCurve | None:
    """The learned cost of a forward, or None."""
    budget = _part(learned, "budget")
    cost = _part(budget, "cost")
    rows, contexts = _numbers(cost.get("rows")), _numbers(cost.get("contexts"))
    shape = (len(contexts), len(rows))
    milliseconds = _table(cost.get("milliseconds"), shape)
    if milliseconds is None:
        return None
    observations = _table(cost.get("observations"), shape)
    return LearnedCostCurve(
        rows,
        contexts,
        milliseconds,
        np.zeros(shape) if observations is None else np.nan_to_num(observations),
    )


def calibration(learned: Mapping[str, Any]) -> Calibration | None:
    """The calibration, or None, also if no node was verified."""
    part = _part(_part(learned, "budget"), "calibration")
    columns = [_numbers(part.get(name)) for name in ("count", "expected", "accepted")]
    if any(len(each) != NUM_TENTHS or not np.isfinite(each).all() for each in columns):
        return None
    return Calibration(*columns) if columns[0].sum() > 0 else None


def node_values(learned: Mapping[str, Any]) -> LearnedNodeValues | None:
    """Expected and real acceptance by source and depth, or None."""
    part = _part(_part(learned, "budget"), "values")
    sources, depths = ([str(each) for each in _list(part.get(name))] for name in
                       ("sources", "depths"))  # fmt: skip
    shape = (len(sources), len(depths))
    expected, accepted = (_table(part.get(name), shape) for name in ("expected", "accepted"))
    if expected is None or accepted is None:
        return None
    return LearnedNodeValues(sources, depths, expected, accepted)


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
