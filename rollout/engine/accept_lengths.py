"""Warns where a draft is accepted much less since a weight update, which shows as lost speed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from rollout.types import Batch, StepResult

log = logging.getLogger(__name__)

_ROWS = 2000  # drafted rows that are compared
_LEAST = 0.1  # accepted draft tokens per row: fewer may halve by chance


class AcceptLengths:
    """Compares how many draft tokens are accepted per drafted row before and after an update.

    The first rows after an update are compared with the first ones after an earlier update, at the
    same temperature: a batch begins wide, with few drafts to a row, and ends narrow. Later steps
    cost nothing.

    Args:
        parts: the models of the worker. Without a draft model among them nothing is compared: a
            corpus learns the new policy by itself.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._parts = parts
        self._before: dict[float, float] = {}  # accepted per row, by temperature
        self._version = 0
        self._is_over = len(parts) < 2
        self._rows: Counter[float] = Counter()
        self._accepted: Counter[float] = Counter()

    def begin(self, version: int) -> None:
        """An update to this version of the target was committed."""
        self._version = version
        self._is_over = len(self._parts) < 2
        self._rows.clear()
        self._accepted.clear()

    def observe(self, batch: Batch, result: StepResult) -> None:
        """Count a step, and warn once where the rows since the last update are enough and bad."""
        if self._is_over:
            return
        for entry, emitted in zip(batch.entries, result.entries, strict=True):
            if emitted.num_drafted:
                temperature = entry.request.params.temperature
                self._rows[temperature] += 1
                self._accepted[temperature] += len(emitted.path)
        for temperature, rows in self._rows.most_common(1):
            if rows >= _ROWS:
                self._is_over = True
                self._compare(temperature, self._accepted[temperature] / rows)

    def _compare(self, temperature: float, accepted: float) -> None:
        before, self._before[temperature] = self._before.get(temperature, 0.0), accepted
        if before >= _LEAST and accepted < before / 2:
            log.warning(
                "since weight version %d the accept length of drafts is %.2f, and was %.2f before "
                "(temperature %g): the draft does not follow the policy. If it is frozen, "
                "spec.frozen=false updates it with the target, selector='draft' alone",
                self._version, 1 + accepted, 1 + before, temperature,
            )  # fmt: skip
