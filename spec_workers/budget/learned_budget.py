"""Draft nodes bought while they bring the step forward faster than they slow it down.

Legend: B entries of a batch, N draft nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.types import Batch, DraftTrees, EntryResult, Request, StepForecast, StepTimes
from spec_workers.budget.budget import SelectedDrafts
from spec_workers.budget.calibration import Calibration, RequestTrust
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.gate import Gate
from spec_workers.budget.node_choice import Choice, choose_nodes, falling
from spec_workers.budget.prices import Prices
from spec_workers.budget.running_mean import MeanByOctave
from spec_workers.budget.step_costs import StepCosts
from spec_workers.draft_tree import first_nodes, only_roots
from spec_workers.target import TargetWorker

_SUREST = 0.98  # nodes that pay only above this probability are not asked for
_WORTHLESS = 1e-6  # milliseconds; nodes may be free

_LEARN_EVERY = 16
"""With the gate closed, one in so many steps is forecast and learned from: that takes time too."""

_NO_VALUES = np.zeros(0)

_PLAIN_EVERY = 32
_FIRST_PLAIN = (4, 8, 16, 32)
"""One in so many steps that may draft decodes plainly, and sooner at first: a run's speedup is
measured against those."""


class Bought(NamedTuple):
    """The nodes that a budget would have verified."""

    choice: Choice
    trees: DraftTrees  # of the bought nodes alone
    values_N: NDArray[np.float64]  # of those nodes
    is_bought_N: NDArray[np.bool_]  # of all nodes


class LearnedBudget:
    """The budget that learns what steps cost and what drafts are worth. See `DraftBudget`."""

    def __init__(self, costs: StepCosts, sources: Sequence[str], min_probability: float) -> None:
        """
        Args:
            costs: of forward and sampling.
            sources: names of the values of ``DraftTrees.sources_N``.
            min_probability: nodes less likely to be accepted are never asked for.
        """
        self.costs = costs
        self._min_probability = min_probability
        self._drafting = MeanByOctave()  # by requests, of steps that propose
        self._idle = MeanByOctave()  # by requests, of steps with the gate closed
        self._calibration = Calibration(sources)
        self._trust = RequestTrust()
        self._gate = Gate()
        self._turns = 0  # steps that could draft
        self._latest: tuple[Batch, Prices] | None = None

    @classmethod
    def for_target(
        cls, target: TargetWorker, sources: Sequence[str], min_probability: float
    ) -> LearnedBudget:
        """The budget of a target of which nothing is known. See the constructor."""
        curve = CostCurve(target.minimum_rows, target.longest_step, target.row_buckets)
        return cls(StepCosts(curve), sources, min_probability)

    @property
    def may_draft(self) -> bool:
        return self._gate.may_draft

    @property
    def is_open(self) -> bool:
        return self._gate.is_open

    def begin_step(self, batch: Batch) -> None:
        if batch.num_sampling:
            self._gate.enter(batch.num_sampling)

    def floors(self, batch: Batch) -> NDArray[np.float64] | None:
        if not self._gate.is_open:
            return None
        prices = self._priced(batch)
        # Drafts are asked for by what is claimed, which is corrected later.
        raised_B = np.maximum(1.0, self._calibration.highest_ratio * self._trusted(batch))
        worth_B = prices.token_ms_B * raised_B
        least_B = np.full(worth_B.size, np.inf)
        np.divide(prices.cheapest_ms, worth_B, out=least_B, where=worth_B > _WORTHLESS)
        least_B[least_B > _SUREST] = np.inf
        if least_B.min(initial=np.inf) == np.inf:
            return None
        return np.maximum(self._min_probability, least_B)

    def wants_plain_step(self) -> bool:
        self._turns += 1
        return self._turns % _PLAIN_EVERY == 0 or self._turns in _FIRST_PLAIN

    def choose(self, batch: Batch, proposed: DraftTrees | None) -> SelectedDrafts:
        trees, values_N = only_roots(len(batch.entries)), _NO_VALUES
        if proposed is None and self._passes_over(batch):
            return SelectedDrafts(trees=trees, values_N=values_N, proposed=None, forecast=None)
        if proposed is not None and proposed.num_nodes:
            values_N = self._calibration.corrected(proposed.probs_N, proposed.sources_N)
            values_N *= np.repeat(self._trusted(batch), np.diff(proposed.offsets_B1))
            _, trees, values_N, _ = self.bought(batch, proposed, values_N)
        return SelectedDrafts(
            trees=trees,
            values_N=values_N,
            proposed=proposed,
            forecast=self._forecast(batch, trees, float(values_N.sum()), proposed is not None),
        )

    def step_ms(self, batch: Batch, num_nodes: int) -> float:
        """Milliseconds of this batch with so many draft nodes: forward and sampling, without
        drafting."""
        return float(self._priced(batch).with_nodes_N1[num_nodes])

    def token_ms(self, batch: Batch) -> NDArray[np.float64] | None:
        return self._priced(batch).token_ms_B if self.costs.is_known else None

    def bought(self, batch: Batch, trees: DraftTrees, values_N: NDArray[np.float64]) -> Bought:
        """The nodes that would be verified if ``values_N`` were the probabilities of all."""
        prices = self._priced(batch)
        step_ms_N1 = prices.with_nodes_N1[: values_N.size + 1]
        values_N = falling(np.minimum(values_N, 1.0), trees.offsets_B1)
        choice = choose_nodes(values_N, trees.offsets_B1, prices.token_ms_B, step_ms_N1)
        bought, is_bought_N = first_nodes(trees, choice.counts_B)
        return Bought(choice, bought, values_N[is_bought_N], is_bought_N)

    def observe(
        self, batch: Batch, selected: SelectedDrafts, results: list[EntryResult], times: StepTimes
    ) -> None:
        proposed, is_open = selected.proposed, self._gate.is_open
        width = batch.num_sampling
        if not width:
            return
        if proposed is None and self._passes_over(batch):
            self._gate.skip(width)
            return
        prices = self._priced(batch)
        # Prompts have rows without logits, and neural drafts read each of them.
        if batch.num_run_tokens == width:
            self.costs.observe(width, selected.trees.num_nodes, times.forward + times.sample)
            if proposed is not None:
                self._drafting.observe(width, times.draft)
            elif not is_open:
                self._idle.observe(width, times.draft)
        if proposed is not None and proposed.num_nodes:
            self._judge(batch, proposed, results)
        if not is_open or prices.with_nodes_N1.size == 1:
            self._gate.skip(width)
        elif self._drafting.milliseconds(width) or not math.isnan(times.draft):
            self._observe_gain(prices, selected, results)

    def change_policy(self) -> None:
        self._calibration.decay()
        self._gate.change_policy()

    def forget(self, request: Request) -> None:
        self._trust.forget(request.request_id)

    def learned(self) -> dict[str, Any]:
        return {
            "cost": self.costs.learned(),
            "calibration": self._calibration.learned(),
            "gate": self._gate.learned(),
        }

    def _passes_over(self, batch: Batch) -> bool:
        return not self._gate.is_open and batch.step % _LEARN_EVERY > 0

    def _priced(self, batch: Batch) -> Prices:
        if self._latest is None or self._latest[0] is not batch:
            self._latest = batch, Prices.of(batch, self.costs)
        return self._latest[1]

    def _trusted(self, batch: Batch) -> NDArray[np.float64]:
        return self._trust.ratios([entry.request.request_id for entry in batch.entries])

    def _forecast(
        self, batch: Batch, trees: DraftTrees, expected: float, is_asked: bool
    ) -> StepForecast | None:
        """``expected``: accepted nodes."""
        prices = self._priced(batch)
        if not prices.width or not self.costs.is_known:
            return None
        idle_ms = self._idle.milliseconds(prices.width)
        drafting_ms = self._drafting.milliseconds(prices.width) if is_asked else idle_ms
        plain_ms = float(prices.with_nodes_N1[0]) + idle_ms
        predicted_ms = float(prices.with_nodes_N1[trees.num_nodes]) + drafting_ms
        token_ms = prices.decode_ms / prices.width
        return StepForecast(
            predicted_ms=predicted_ms,
            plain_ms=plain_ms,
            decode_ms=prices.decode_ms,
            predicted_gain_ms=expected * token_ms - (predicted_ms - plain_ms),
        )

    def _judge(self, batch: Batch, proposed: DraftTrees, results: list[EntryResult]) -> None:
        """Learn which drafts came true.

        A child of the root is decided by the emitted token even if it was not verified, so a
        source that is no longer verified can recover. Deeper nodes are decided where they were
        verified. Requests that ended are left out: a stop hides what came after it.
        """
        sizes_B, count = np.diff(proposed.offsets_B1), len(results)
        entry_N = np.repeat(np.arange(count), sizes_B)
        index_N = np.arange(proposed.num_nodes) - np.repeat(proposed.offsets_B1[:-1], sizes_B)
        goes_on_B = np.array([bool(r.token_ids) and r.finish_reason is None for r in results])
        next_B = np.array([r.token_ids[0] if r.token_ids else -1 for r in results])
        drafted_B = np.array([r.num_drafted for r in results])
        first_N = proposed.depths_N == 1
        known_N = goes_on_B[entry_N] & (first_N | (index_N < drafted_B[entry_N]))
        accepted_N = first_N & (proposed.tokens_N == next_B[entry_N])
        for b, result in enumerate(results):
            if result.path:
                path = np.array(result.path, dtype=np.intp)
                accepted_N[int(proposed.offsets_B1[b]) - 1 + path] = True
        expected_N = self._calibration.corrected(proposed.probs_N, proposed.sources_N)
        expected_B = np.bincount(entry_N, expected_N * known_N, count).tolist()
        accepted_B = np.bincount(entry_N, accepted_N & known_N, count).tolist()
        for entry, expected, accepted in zip(batch.entries, expected_B, accepted_B, strict=True):
            if expected:
                self._trust.observe(entry.request.request_id, expected, accepted)
        self._calibration.observe(
            proposed.probs_N[known_N], proposed.sources_N[known_N], accepted_N[known_N]
        )

    def _observe_gain(
        self, prices: Prices, selected: SelectedDrafts, results: list[EntryResult]
    ) -> None:
        """Tell the gate what drafts gained, by usual times: one slow step would outweigh fifty good
        ones, and prompts are read whether the gate is open or not."""
        width = prices.width
        accepted_B = np.array([len(result.path) for result in results])
        saved_ms = float(accepted_B @ prices.token_ms_B)
        plain_ms = float(prices.with_nodes_N1[0])
        spent_ms = float(prices.with_nodes_N1[selected.trees.num_nodes]) - plain_ms
        drafting_ms = self._drafting.milliseconds(width) - self._idle.milliseconds(width)
        self._gate.observe(width, saved_ms - spent_ms - max(0.0, drafting_ms), plain_ms)
