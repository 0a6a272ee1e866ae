"""The number of tensors that a weight update brought, by what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NO_PART = "none"
"""Stands for the part of tensors that no model of the worker has, such as a vision tower's."""


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """Tensors of a committed update, by part (`target`, `draft`, `draft_step_<i>`, or `none`).

    A tensor is counted for the part that owns it; one that comes as a change counts once.
    """

    stored: Mapping[str, int]
    ignored: Mapping[str, int]  # parts that the update leaves alone, and what no model has

    def __str__(self) -> str:
        texts = [
            f"{outcome} {', '.join(f'{count} of {part}' for part, count in counts.items())}"
            for outcome, counts in (("stored", self.stored), ("ignored", self.ignored))
            if counts
        ]
        return "; ".join(texts) or "no tensor came"

    @property
    def flat(self) -> dict[str, int]:
        """The counts as gauges are named: ``ignored/draft``."""
        return {f"stored/{part}": count for part, count in self.stored.items()} | {
            f"ignored/{part}": count for part, count in self.ignored.items()
        }
