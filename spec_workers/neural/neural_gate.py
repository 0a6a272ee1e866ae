"""Whether a neural draft pays beside the corpus, which costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollout.parallel import RankGroup, SingleRank
from rollout.types import DraftTrees
from spec_workers.budget import DraftBudget, LearnedBudget
from spec_workers.budget.gate import Gate
from spec_workers.budget.node_values import NodeValues
from spec_workers.budget.step_cost import LinearCost
from spec_workers.hindsight import accepted_in_hindsight, agreement
from spec_workers.observation import Observation

_HORIZON = 48.0  # steps that weigh in the rate of the corpus alone


class NeuralGate:
    """Opens and closes by tokens per millisecond, with the draft and without.

    Both are told of the same steps, those with the draft: what is emitted does not depend on
    drafts, so it says how far the corpus's own tree would have come, cut by the budget as it would
    have been. Two stretches of a text compared with each other would need many more steps. With a
    budget that does not learn what steps cost it is always open.
    """

    def __init__(
        self, budget: DraftBudget, sources: Sequence[str], group: RankGroup | None = None
    ) -> None:
        """
        Args:
            sources: names of the values of ``sources_N`` in the corpus's trees.
            group: ranks that run the same requests: rank 0's times are those of all.
        """
        self._budget = budget
        self._group: RankGroup = group or SingleRank()
        # The budget's own are of nodes that are left when those both propose are taken out.
        self._values = NodeValues(sources)
        self._gate = Gate()
        self._drafting = LinearCost()  # by requests asked about
        self._spent_ms = 0.0  # in the step in hand
        self._alone_saved_ms = self._alone_ms = 0.0  # of late: of the corpus alone

    @property
    def is_open(self) -> bool:
        return self._gate.is_open

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Around what the draft does for a step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent_ms += (time.perf_counter() - started) * 1e3

    def judge(
        self, step: Observation, copied: DraftTrees, num_asked: int, *, is_steady: bool = True
    ) -> None:
        """At the end of a step, in which the draft ran if the gate was open.

        Args:
            copied: what the corpus proposed.
            num_asked: of the batch's requests, those the draft was asked about.
            is_steady: the timing is steady-state: nothing was compiled or captured in it.
        """
        (spent_ms,) = self._group.first([self._spent_ms])
        self._spent_ms = 0.0
        budget, batch = self._budget, step.batch
        if not isinstance(budget, LearnedBudget) or not budget.cost.is_known:
            return
        sampling = [entry.request.params.temperature for entry in batch.entries if entry.samples]
        if not sampling:
            return
        width, temperature = len(sampling), sum(sampling) / len(sampling)
        if not self.is_open:
            self._gate.skip(width, temperature)
            return
        if is_steady and not step.runs_prompts:  # those are read whether the gate is open or not
            self._drafting.observe(num_asked, spent_ms)
        values_N = self._values.corrected(copied.probs_N, copied.sources_N, copied.depths_N)
        choice, alone, values_N = budget.bought(batch, copied, values_N)
        accepted_B = accepted_in_hindsight(alone, values_N, step.results)
        num_emitted = sum(max(0, len(result.token_ids) - 1) for result in step.results)
        # The root's token is the plain step itself.
        plain_ms, token_ms = budget.step_ms(batch, 0), budget.token_ms(batch)
        saved_ms = plain_ms + token_ms * num_emitted
        ms = budget.step_ms(batch, step.trees.num_nodes) + self._drafting.milliseconds(num_asked)
        alone_saved_ms = plain_ms + token_ms * float(accepted_B.sum())
        keep = 1.0 - 1.0 / _HORIZON
        self._alone_saved_ms = self._alone_saved_ms * keep + alone_saved_ms
        self._alone_ms = self._alone_ms * keep + choice.step_ms
        # The time in which the corpus alone would have come as much further.
        further_ms = (saved_ms - alone_saved_ms) * self._alone_ms / self._alone_saved_ms
        gained_ms = further_ms - (ms - choice.step_ms)
        self._gate.observe(width, gained_ms, ms, temperature)
        self._learn(copied, step)

    def _learn(self, copied: DraftTrees, step: Observation) -> None:
        right_N, known_N = agreement(copied, step.results)
        self._values.observe(
            copied.probs_N[known_N],
            copied.sources_N[known_N],
            copied.depths_N[known_N],
            right_N[known_N],
        )

    def change_policy(self) -> None:
        self._values.decay()
        self._gate.change_policy()

    def learned(self) -> dict[str, Any]:
        """For people to look at."""
        return self._gate.learned()
