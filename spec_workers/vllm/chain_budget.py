"""Chooses how many tokens of each chain vLLM verifies, by costs measured from outside.

Legend: B rows of a batch, N draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.gate import Gate
from spec_workers.budget.node_choice import choose_nodes, falling
from spec_workers.budget.node_values import NodeValues
from spec_workers.budget.schedule import SUREST, DraftSchedule

_LEAST = 0.02
"""Tokens less probable than this are not bought: what they add is less than the prices' error."""

_PRICE_EVERY = 16
"""Steps of an unchanged batch that are priced alike; fewer at first, while much is learned."""

_SLOWEST = 1.25
"""A step's time counts as at most this multiple of the curve's: one step that something else slowed
would outweigh fifty good ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTokens:
    """Draft tokens of the step before, of which the target has decided."""

    probs_N: NDArray[np.floating]  # as they were estimated
    depths_N: NDArray[np.int64]  # 1: the first of its chain
    accepted_N: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStep:
    """A step that has ended, as far as a proposer sees it."""

    width: int  # rows that sampled
    num_drafted: int  # tokens that were proposed for them
    longest: int  # tokens of the longest row
    num_accepted: int
    milliseconds: float  # without drafting; NaN where other rows took part
    drafting_ms: float
    judged: JudgedTokens


class ChainBudget(Protocol):
    """Chooses how many tokens of each chain are verified."""

    def floor(self, width: int, longest: int) -> float | None:
        """The least probability at which a token could pay next. None: draft nothing."""
        ...

    def choose(
        self, probs_N: NDArray[np.floating], depths_N: NDArray[np.int64], offsets_B1: NDArray
    ) -> NDArray[np.int64]:
        """The number of first tokens of each chain to verify: [B]. Called after a `floor` that is
        not None."""
        ...

    def observe(self, step: ChainStep) -> None:
        """Learn from the step that the latest `floor` was asked for."""
        ...

    def change_policy(self) -> None:
        """The target's weights changed."""
        ...

    def counters(self) -> dict[str, float]:
        """Gauges by name."""
        ...


class FixedChains:
    """Verifies all that is proposed."""

    def __init__(self, min_probability: float) -> None:
        self._min_probability = min_probability

    def floor(self, width: int, longest: int) -> float | None:
        return self._min_probability

    def choose(
        self, probs_N: NDArray[np.floating], depths_N: NDArray[np.int64], offsets_B1: NDArray
    ) -> NDArray[np.int64]:
        return np.diff(offsets_B1)

    def observe(self, step: ChainStep) -> None:
        pass

    def change_policy(self) -> None:
        pass

    def counters(self) -> dict[str, float]:
        return {}


class LearnedChains:
    """Buys tokens while they bring the step forward faster than they slow it down.

    What steps cost is learned from the time between two calls of the proposer.
    """

    def __init__(
        self,
        num_tokens: int,
        max_rows: int,
        max_len: int,
        row_buckets: Sequence[int],
        min_probability: float,
    ) -> None:
        """``row_buckets``: forwards are padded to the next of these; none where they are not."""
        self.curve = CostCurve(1, max_rows * (1 + num_tokens), max_len, row_buckets)
        self._num_tokens = num_tokens
        self._min_probability = min_probability
        self._values = NodeValues(("corpus",))
        self._gate = Gate()
        self._schedule = DraftSchedule()
        self._counts = False  # whether the gate hears of the step
        self._priced = (0, 0, 0)  # width, longest row, step
        self._with_tokens_N1 = np.zeros(1)  # milliseconds of a step with 0, 1, ... draft tokens

    def floor(self, width: int, longest: int) -> float | None:
        self._counts = self._gate.is_open
        if not self._gate.is_open:
            self._gate.skip(width)
            return None
        if self._schedule.takes_plain_turn():
            self._counts = False
            return None
        self._price(width, longest)
        plain_ms = float(self._with_tokens_N1[0])
        extra_ms_N = self._with_tokens_N1[1:] - plain_ms
        cheapest_ms = float((extra_ms_N / np.arange(1, extra_ms_N.size + 1)).min())
        raised = max(1.0, self._values.highest_ratio)  # estimates are asked for uncorrected
        least = cheapest_ms * width / (plain_ms * raised)
        if least > SUREST:
            self._schedule.has_drafts = False
            return None
        return max(self._min_probability, _LEAST, least)

    def choose(
        self, probs_N: NDArray[np.floating], depths_N: NDArray[np.int64], offsets_B1: NDArray
    ) -> NDArray[np.int64]:
        width = self._priced[0]
        plain_ms = float(self._with_tokens_N1[0])
        values_N = self._values.corrected(probs_N, np.zeros(probs_N.size, np.intp), depths_N)
        values_N = falling(np.minimum(values_N, 1.0), offsets_B1)
        token_ms_B = np.full(offsets_B1.size - 1, plain_ms / width)
        step_ms_N1 = self._with_tokens_N1[: values_N.size + 1]
        choice = choose_nodes(values_N, offsets_B1, token_ms_B, step_ms_N1)
        counts_B = choice.counts_B
        gain_ms = choice.saved_ms - (choice.step_ms - plain_ms)
        if not self._schedule.pays(gain_ms, plain_ms):
            counts_B = np.zeros_like(counts_B)
        self._schedule.has_drafts = bool(counts_B.any())
        return counts_B

    def observe(self, step: ChainStep) -> None:
        if not step.width:
            return
        judged = step.judged
        self._values.observe(
            judged.probs_N,
            np.zeros(judged.probs_N.size, np.intp),
            judged.depths_N,
            judged.accepted_N,
        )
        if since := self._schedule.end_step():
            rows = step.width + step.num_drafted
            self.curve.observe(rows, step.longest, step.milliseconds, since)
            self._values.fade()
        if self._counts and self.curve.is_known:
            self._counts = False
            self._price(step.width, step.longest)
            plain_ms = float(self._with_tokens_N1[0])
            usual_ms = took_ms = float(self._with_tokens_N1[step.num_drafted])
            if step.milliseconds > 0:
                took_ms = min(step.milliseconds, _SLOWEST * usual_ms)
            saved_ms = step.num_accepted * plain_ms / step.width
            extra_ms = took_ms - plain_ms if step.num_drafted else 0.0
            gained_ms = saved_ms - extra_ms - step.drafting_ms
            self._gate.observe(step.width, gained_ms, plain_ms)

    def change_policy(self) -> None:
        self._values.decay()
        self._gate.change_policy()

    def counters(self) -> dict[str, float]:
        return {"gate_open": float(self._gate.is_open), "steps": float(self._schedule.steps)}

    def _price(self, width: int, longest: int) -> None:
        known_width, known_longest, step = self._priced
        near = known_longest <= longest < known_longest + 256
        until = step + min(_PRICE_EVERY, step + 1)
        if width == known_width and near and self._schedule.steps < until:
            return
        rows = width + np.arange(1 + width * self._num_tokens)
        self._with_tokens_N1 = self.curve.milliseconds(rows, longest)
        self._priced = (width, longest, self._schedule.steps)
