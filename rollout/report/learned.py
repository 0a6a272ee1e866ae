"""The engine's learned costs and estimates, as far as a log has them whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

NUM_TENTHS = 10

T = TypeVar("T")


class CostCurve(msgspec.Struct):
    """Milliseconds of a forward, without drafting and sampling, by query rows for each context."""

    rows_R: np.ndarray = msgspec.field(name="rows")
    contexts_C: np.ndarray = msgspec.field(name="contexts")
    milliseconds_CR: np.ndarray = msgspec.field(name="milliseconds")
    # Weight of the measurements behind each; zeros where not logged:
    observations_CR: np.ndarray = msgspec.field(
        name="observations", default_factory=lambda: np.zeros(0)
    )

    def __post_init__(self) -> None:
        shape = (len(self.contexts_C), len(self.rows_R))
        _check_shape(self.milliseconds_CR, shape)
        if self.observations_CR.shape != shape:
            self.observations_CR = np.zeros(shape)
        self.observations_CR = np.nan_to_num(self.observations_CR)


class Calibration(msgspec.Struct):
    """Verified nodes by tenth of their estimated probability of being accepted."""

    count_K: np.ndarray = msgspec.field(name="count")
    expected_K: np.ndarray = msgspec.field(name="expected")  # summed estimates
    accepted_K: np.ndarray = msgspec.field(name="accepted")

    def __post_init__(self) -> None:
        for column in (self.count_K, self.expected_K, self.accepted_K):
            _check_shape(column, (NUM_TENTHS,))
            if not np.isfinite(column).all():
                raise ValueError("some are unknown")
        if not self.count_K.sum():
            raise ValueError("no node was verified")


class NodeValues(msgspec.Struct):
    """Verified nodes by what proposed them and how deep in the tree."""

    sources: list[str]
    depths: list[str]
    expected_SD: np.ndarray = msgspec.field(name="expected")
    accepted_SD: np.ndarray = msgspec.field(name="accepted")

    def __post_init__(self) -> None:
        for table in (self.expected_SD, self.accepted_SD):
            _check_shape(table, (len(self.sources), len(self.depths)))


def cost_curve(learned: Mapping[str, Any]) -> CostCurve | None:
    """None where the log has no whole one."""
    return _part_of_budget(learned, "cost", CostCurve)


def calibration(learned: Mapping[str, Any]) -> Calibration | None:
    """None where the log has no whole one, or no node was verified."""
    return _part_of_budget(learned, "calibration", Calibration)


def node_values(learned: Mapping[str, Any]) -> NodeValues | None:
    """None where the log has no whole ones."""
    return _part_of_budget(learned, "values", NodeValues)


def scalars(learned: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Every single value below ``learned``, with dotted names; no lists."""
    values: list[tuple[str, object]] = []
    for name, value in learned.items():
        if isinstance(value, Mapping):
            values += scalars(value, f"{prefix}{name}.")
        elif isinstance(value, (str, int, float)):
            values.append((f"{prefix}{name}", value))
    return values


def _part_of_budget(learned: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """None where it is not there, or odd."""
    budget = learned.get("budget")
    try:
        found = budget.get(name) if isinstance(budget, Mapping) else None
        return msgspec.convert(found, kind, dec_hook=_array)
    except msgspec.ValidationError:
        return None


def _array(kind: type, value: object) -> np.ndarray:
    """Numbers, or rows of numbers; NaN for null, as which it is logged."""
    if not isinstance(value, list):
        raise TypeError(f"must be a list, not {value!r}")
    return np.array(value, dtype=np.float64)


def _check_shape(array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape or not array.size:
        raise ValueError(f"is of shape {array.shape}, not {shape}")
