"""Names that trainers give weight versions, which sglang calls by texts."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from rollout.types import Rollout

_MAX_LABELS = 4096  # the newest: tokens of older versions are told by number


class VersionLabels:
    """The label of each weight version; a version without one is told by its number.

    Written on the engine's thread, read on any.
    """

    def __init__(self) -> None:
        self._labels: OrderedDict[int, str] = OrderedDict()

    def of(self, version: int) -> str:
        return self._labels.get(version, str(version))

    def note(self, before: int, version: int, name: int | str | None) -> None:
        """An update of version ``before`` has made ``version``, and called it by a number or a
        label; None: the label stays. An update of drafts alone makes none."""
        if version == before:
            return
        label = self._labels.get(before) if name is None else name
        self._labels.pop(version, None)
        if isinstance(label, str):
            self._labels[version] = label
            if len(self._labels) > _MAX_LABELS:
                self._labels.popitem(last=False)

    def spans(self, rollout: Rollout) -> list[dict[str, Any]]:
        """The version of each stretch of a rollout's tokens, as it is told."""
        spans: list[dict[str, Any]] = []
        for version, start, end in rollout.weight_version_spans:
            told = self.of(version)
            if spans and spans[-1]["version"] == told:
                spans[-1]["end"] = end
            else:
                spans.append({"version": told, "start": start, "end": end})
        return spans
