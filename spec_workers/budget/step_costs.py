"""The times of forwards with draft nodes, and without: of equal rows, those with nodes take
longer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_workers.budget.cost_curve import CostCurve


class StepCosts:
    """Milliseconds of a step's forward and sampling, by its rows and its draft nodes.

    Until a step with nodes was timed, nodes cost what other rows do.
    """

    def __init__(self, plain: CostCurve) -> None:
        """``plain``: of forwards without nodes."""
        self.plain = plain
        self._drafting: CostCurve | None = None

    @property
    def is_known(self) -> bool:
        """Whether any forward was timed."""
        return self.plain.is_known

    def observe(self, rows: int, num_nodes: int, milliseconds: float) -> None:
        """Learn the time of a forward of ``rows`` rows and ``num_nodes`` more. NaN is ignored."""
        if not num_nodes:
            surprise = self.plain.observe(rows, milliseconds)
            if self._drafting is not None:
                self._drafting.drift(surprise)
            return
        if self._drafting is None:
            self._drafting = self.plain.copy()
        self.plain.drift(self._drafting.observe(rows + num_nodes, milliseconds))

    def with_nodes(self, rows: int, max_nodes: int) -> NDArray[np.float64]:
        """The times with 0, 1, ... ``max_nodes`` draft nodes: [max_nodes + 1], none less than the
        first."""
        curve = self._drafting or self.plain
        times_N1 = curve.milliseconds(np.arange(rows, rows + max_nodes + 1))
        times_N1[0] = self.plain.at(rows)
        return np.maximum(times_N1, times_N1[0])

    def learned(self) -> dict[str, Any]:
        """The plain curve as a JSON-able object."""
        return self.plain.learned()
