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
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.gate import Gate
from spec_workers.budget.node_choice import Choice, choose_nodes, falling
from spec_workers.budget.node_values import NodeValues, RequestTrust
from spec_workers.budget.prices import KnownPrices, Prices
from spec_workers.budget.schedule import SUREST, DraftSchedule
from spec_workers.budget.step_cost import StepCost
from spec_workers.budget.token_worth import AcceptRate
from spec_workers.draft_tree import first_nodes, only_roots
from spec_workers.target import TargetWorker

_WORTHLESS = 1e-6  # milliseconds; nodes may be free

_SAVED_TOGETHER = 0.9
"""The share of the saved time that the gate counts where several requests decode: those that
accept more than others end sooner, and the batch that is left takes more than its share."""

_MAX_OUTLIER = 2.0
"""The time of one step's drafting counts as at most this multiple of the usual time."""


class Bought(NamedTuple):
    """The nodes that a budget would have verified."""

    choice: Choice
    trees: DraftTrees  # of the bought nodes alone
    values_N: NDArray[np.float64]  # of those nodes
    is_bought_N: NDArray[np.bool_]  # of all nodes


class LearnedBudget:
    """The budget that learns what steps cost and what drafts are worth. See `DraftBudget`."""

    def __init__(
        self,
        cost: StepCost,
        values: NodeValues,
        min_probability: float,
        *,
        reads_while_open: bool = False,
    ) -> None:
        """
        Args:
            min_probability: nodes less likely to be accepted are never asked for.
            reads_while_open: while drafting is open a draft may read every token, also in steps
                that propose nothing. It costs what it reads, for decoding plainly would not.
        """
        self.cost = cost
        self._values = values
        self._min_probability = min_probability
        self._reads_while_open = reads_while_open
        self._trust = RequestTrust()
        self._accept_rate = AcceptRate()
        self._gate = Gate()
        self._schedule = DraftSchedule()
        self._prices = KnownPrices()

    @classmethod
    def for_target(
        cls,
        target: TargetWorker,
        sources: Sequence[str],
        min_probability: float,
        *,
        reads_while_open: bool = False,
    ) -> LearnedBudget:
        """``sources``: names of the values of ``DraftTrees.sources_N``."""
        curve = CostCurve(
            target.minimum_rows, target.longest_step, target.max_context_len, target.row_buckets
        )
        cost = StepCost(curve)
        values = NodeValues(sources)
        return cls(cost, values, min_probability, reads_while_open=reads_while_open)

    @property
    def is_open(self) -> bool:
        return self._gate.is_open

    def floors(self, batch: Batch) -> NDArray[np.float64] | None:
        if not self._gate.is_open:
            return None
        prices = self._priced(batch)
        if prices.width == 0 or prices.with_nodes_N1.size == 1:
            return None
        trust_B = self._trust.ratios([entry.request.request_id for entry in batch.entries])
        # Drafts are asked for by their estimates, which are corrected later.
        raised_B = np.maximum(1.0, self._values.highest_ratio * trust_B)
        worth_B = prices.token_ms_B * raised_B
        least_B = np.full(worth_B.size, np.inf)
        np.divide(prices.cheapest_ms, worth_B, out=least_B, where=worth_B > _WORTHLESS)
        least_B[least_B > SUREST] = np.inf
        prices.is_hopeless = bool(least_B.min() == np.inf)
        return None if prices.is_hopeless else np.maximum(self._min_probability, least_B)

    def wants_plain_step(self) -> bool:
        return self._schedule.takes_plain_turn()

    def choose(self, batch: Batch, proposed: DraftTrees | None) -> SelectedDrafts:
        prices = self._priced(batch)
        trees, values_N = only_roots(len(batch.entries)), np.zeros(0)
        if proposed is None:
            forecast = self._plain_forecast(prices)
            return SelectedDrafts(trees=trees, values_N=values_N, proposed=None, forecast=forecast)
        if proposed.num_nodes:
            trees, values_N = self._chosen(batch, prices, proposed)
        drafting_ms = self.cost.draft_ms(prices.width)
        forecast = self._forecast(prices, trees.num_nodes, float(values_N.sum()), drafting_ms)
        return SelectedDrafts(trees=trees, values_N=values_N, proposed=proposed, forecast=forecast)

    def step_ms(self, batch: Batch, num_nodes: int) -> float:
        """Milliseconds of this batch with so many draft nodes: forward and sampling, without
        drafting."""
        return float(self._priced(batch).with_nodes_N1[num_nodes])

    def token_ms(self, batch: Batch) -> NDArray[np.float64] | None:
        return self._priced(batch).token_ms_B if self.cost.is_known else None

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
        prices, trees = self._priced(batch), selected.trees
        is_open, proposed = self._gate.is_open, selected.proposed is not None
        is_plain_turn = is_open and not proposed and not prices.is_hopeless
        if not is_plain_turn:
            self._schedule.has_drafts = trees.num_nodes > 0
        could_draft = prices.with_nodes_N1.size > 1
        teaches = is_plain_turn and could_draft
        if self._reads_while_open and not is_open:  # no other steps tell what following takes
            teaches = not self.cost.idle_draft_ms(prices.width)
        if steps := self._schedule.end_step(is_open, teaches=teaches):
            self.cost.observe(
                width=prices.width,
                rows=batch.num_run_tokens + trees.num_nodes,
                longest_context=prices.longest_context,
                proposed=proposed,
                reads=self._reads,
                times=times,
                decode_only=batch.num_run_tokens == prices.width,
                steps=steps,
            )
            self._values.fade()
        if selected.proposed is not None and selected.proposed.num_nodes:
            self._judge(batch, selected.proposed, results)
        if trees.num_nodes:
            accepted = sum(len(result.path) for result in results)
            self._accept_rate.observe(accepted / prices.width)
        else:
            self._accept_rate.fade()
        if prices.width:
            runs_prompts = batch.num_run_tokens != prices.width
            self._observe_gain(prices, selected, results, times, runs_prompts=runs_prompts)

    def change_policy(self) -> None:
        self._values.decay()
        self._accept_rate.decay()
        self._gate.change_policy()

    def forget(self, request: Request) -> None:
        self._trust.forget(request.request_id)

    def learned(self) -> dict[str, Any]:
        return {**self.cost.learned(), **self._values.learned(), "gate": self._gate.learned()}

    def _priced(self, batch: Batch) -> Prices:
        return self._prices.of(batch, self.cost, self._schedule.steps, self._accept_rate.value)

    def _chosen(
        self, batch: Batch, prices: Prices, proposed: DraftTrees
    ) -> tuple[DraftTrees, NDArray[np.float64]]:
        values_N = self._values.corrected(proposed.probs_N, proposed.sources_N, proposed.depths_N)
        trust_B = self._trust.ratios([entry.request.request_id for entry in batch.entries])
        values_N *= np.repeat(trust_B, np.diff(proposed.offsets_B1))
        choice, trees, values_N, _ = self.bought(batch, proposed, values_N)
        plain_ms = float(prices.with_nodes_N1[0])
        gain_ms = choice.saved_ms - (choice.step_ms - plain_ms)
        if not self._schedule.pays(gain_ms, plain_ms):
            return only_roots(proposed.offsets_B1.size - 1), np.zeros(0)
        return trees, values_N

    @property
    def _reads(self) -> bool:
        """Whether a draft reads the tokens of a step in which it is not asked."""
        return self._reads_while_open and self._gate.is_open

    def _plain_forecast(self, prices: Prices) -> StepForecast | None:
        """The forecast of a step that proposes nothing."""
        if self._reads:
            return self._forecast(prices, 0, 0.0, self.cost.read_ms(prices.width))
        if prices.plain_forecast is None:
            following_ms = self.cost.idle_draft_ms(prices.width)
            prices.plain_forecast = self._forecast(prices, 0, 0.0, following_ms)
        return prices.plain_forecast

    def _forecast(
        self, prices: Prices, num_nodes: int, expected: float, drafting_ms: float
    ) -> StepForecast | None:
        """The forecast of a step. ``expected``: accepted nodes."""
        if not prices.width or not self.cost.is_known:
            return None
        plain_ms = float(prices.with_nodes_N1[0]) + self.cost.idle_draft_ms(prices.width)
        predicted_ms = float(prices.with_nodes_N1[num_nodes]) + drafting_ms
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
        sizes_B = np.diff(proposed.offsets_B1)
        count = len(results)
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
        believed_N = self._values.corrected(proposed.probs_N, proposed.sources_N, proposed.depths_N)
        expected_B = np.bincount(entry_N, believed_N * known_N, count).tolist()
        accepted_B = np.bincount(entry_N, accepted_N & known_N, count).tolist()
        for entry, expected, accepted in zip(batch.entries, expected_B, accepted_B, strict=True):
            if expected:
                self._trust.observe(entry.request.request_id, expected, int(accepted))
        self._values.observe(
            proposed.probs_N[known_N],
            proposed.sources_N[known_N],
            proposed.depths_N[known_N],
            accepted_N[known_N],
        )

    def _observe_gain(
        self,
        prices: Prices,
        selected: SelectedDrafts,
        results: list[EntryResult],
        times: StepTimes,
        *,
        runs_prompts: bool,
    ) -> None:
        """Tell the gate what drafts gained. Usual times count, not this step's: one slow step would
        outweigh fifty good ones, and prompts are read whether the gate is open or not."""
        width = prices.width
        if selected.proposed is None:
            if self._gate.is_open and prices.is_hopeless:
                plain_ms = float(prices.with_nodes_N1[0])
                lost_ms = max(0.0, self.cost.read_ms(width) - self.cost.idle_draft_ms(width))
                self._gate.observe(width, -lost_ms, plain_ms, prices.temperature)
            else:
                self._gate.skip(width, prices.temperature)
            return
        accepted_B = np.array([len(result.path) for result in results])
        saved_ms = float(accepted_B @ prices.token_ms_B)
        if prices.width > 1:
            saved_ms *= _SAVED_TOGETHER
        plain = float(prices.with_nodes_N1[0])
        extra_ms = float(prices.with_nodes_N1[selected.trees.num_nodes]) - plain
        usual = self.cost.draft_ms(width)
        if math.isnan(times.draft) and not usual:
            return  # the time that drafting takes is not known yet
        if not usual:
            spent = times.draft
        elif math.isnan(times.draft) or runs_prompts:
            spent = usual
        else:
            spent = min(times.draft, _MAX_OUTLIER * usual)
        drafting = spent - self.cost.idle_draft_ms(width)
        gained = saved_ms - extra_ms - max(0.0, drafting)
        self._gate.observe(width, gained, plain, prices.temperature)
