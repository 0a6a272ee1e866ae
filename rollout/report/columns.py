"""Numbers of many lines, a column per name."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Columns = dict[str, np.ndarray]
"""float64 arrays of one length, NaN where a line does not say."""


class ColumnsBuilder:
    """Takes lines in and keeps 8 bytes per number, for a log may have very many."""

    def __init__(self, names: Iterable[str]) -> None:
        self._values = {name: array("d") for name in names}

    def add(self, line: Mapping[str, Any]) -> None:
        for name, values in self._values.items():
            values.append(number(line.get(name)))

    def columns(self) -> Columns:
        return {name: np.array(values, dtype=np.float64) for name, values in self._values.items()}


def number(value: object) -> float:
    """``value`` as a finite float; NaN for everything else JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float("nan")
    try:
        result = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return float("nan")
    return result if abs(result) != float("inf") else float("nan")


def total(values: np.ndarray) -> float:
    """The sum of what is known; 0 where nothing is."""
    return float(np.nansum(values))


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
