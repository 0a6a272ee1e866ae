"""Which steps draft, which decode plainly for comparison, and which teach what steps cost."""

from __future__ import annotations

SUREST = 0.98
"""A step drafts nothing if nodes pay only above this probability: the little that they could gain
is less than it takes to ask."""

_TO_BEGIN = 0.02
"""A step that follows one without drafts has drafts only if they gain more than this share of its
time, so that noise in the estimates does not turn them on and off."""

_FIRST_STEPS = 128
_LEARN_EVERY = 8
_LEARN_EVERY_CLOSED = 128
"""Costs are learned from each of the first steps, then from two in so many: looking at a step costs
a part of what there is to spare. Two in a row, for between those the machine has hardly changed:
they tell what rows cost. Plain steps among drafting ones are few, and all of them teach."""

_PLAIN_EVERY = 64
_FIRST_PLAIN = (4, 8, 16, 32)
"""One in so many steps that may draft runs plain, and sooner at first: what drafts save is measured
against those. It costs a 64th of what is saved."""


class DraftSchedule:
    """Counts the steps of a budget.

    ``steps``: those that ended. ``has_drafts``: whether the latest step that was asked for drafts
    had any, plain ones for comparison left out.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.has_drafts = False
        self._turns = 0  # steps that might draft
        self._learned_at = 0  # the step that costs were last learned from

    def takes_plain_turn(self) -> bool:
        """Whether a step that may draft decodes plainly instead. Asked once per step."""
        self._turns += 1
        return self._turns % _PLAIN_EVERY == 0 or self._turns in _FIRST_PLAIN

    def pays(self, gain_ms: float, plain_ms: float) -> bool:
        """Whether to draft in a step that gains ``gain_ms`` over a plain one of ``plain_ms``."""
        return self.has_drafts or gain_ms >= _TO_BEGIN * plain_ms

    def end_step(self, gate_is_open: bool = True, *, teaches: bool = False) -> int:
        """Count a step. Returns how many ended since costs were last learned, if they are to be
        learned from this one; else 0. ``teaches``: they are, whatever its number."""
        self.steps += 1
        every = _LEARN_EVERY if gate_is_open else _LEARN_EVERY_CLOSED
        if not teaches and self.steps > _FIRST_STEPS and self.steps % every >= 2:
            return 0
        since, self._learned_at = self.steps - self._learned_at, self.steps
        return since
