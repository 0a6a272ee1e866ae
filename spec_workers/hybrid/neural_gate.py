"""The gate of a neural draft beside the corpus: open while the draft pays for its time.

What is emitted does not depend on drafts, so trees that were not verified are judged by it too.

Legend: B entries, N draft nodes, L tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.types import Batch, DraftTrees, EntryResult
from spec_workers.budget import DraftBudget, LearnedBudget
from spec_workers.budget.calibration import Calibration
from spec_workers.budget.gate import Gate
from spec_workers.budget.running_mean import MeanByOctave
from spec_workers.step.observation import Observation

_HORIZON = 48.0  # steps that weigh in the rate of the corpus alone

_FIRST_STEPS = 48
_EVERY = 3
"""The first steps after the gate opened are judged, then one in `_EVERY`, since judging takes about
1 % of a step at batch 1. It does not divide the number of steps between two plain turns of the
budget."""


class NeuralGate:
    """Opens and closes by tokens per millisecond, with the draft and without.

    Both are judged by the same steps, those with the draft. Emitted tokens do not depend on drafts,
    so they tell how far the corpus's own tree would have come, as the budget would have cut it.
    To compare two stretches of a text would take many more steps. With a budget that does not learn
    what steps cost the gate is always open.
    """

    def __init__(self, budget: DraftBudget, sources: Sequence[str]) -> None:
        self._budget = budget
        # The budget's own lack the nodes that both propose: those are a source of their own.
        self._calibration = Calibration(sources)
        self._gate = Gate()
        self._drafting = MeanByOctave()  # by requests asked about
        self._spent_ms = 0.0  # in the step in hand
        self._open_steps = 0  # since it opened
        self._alone_saved_ms = self._alone_ms = 0.0  # of late: of the corpus alone

    def begin_step(self, batch: Batch) -> None:
        """Judge this batch's octave of requests from now on."""
        if batch.num_sampling:
            self._gate.enter(batch.num_sampling)

    @property
    def is_open(self) -> bool:
        """Whether the step that was begun may ask the draft."""
        return self._gate.is_open

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the context as the draft's time in this step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent_ms += (time.perf_counter() - started) * 1e3

    def judge(
        self, step: Observation, copied: DraftTrees, num_asked: int, *, is_steady: bool = True
    ) -> None:
        """Compare the draft with the corpus alone, at the end of a step, in which the draft ran if
        the gate was open.

        Args:
            copied: what the corpus proposed.
            num_asked: of the batch's requests, those the draft was asked about.
            is_steady: the timing is steady-state: nothing was compiled or captured in it.
        """
        spent_ms, self._spent_ms = self._spent_ms, 0.0
        budget, batch = self._budget, step.batch
        token_ms_B = budget.token_ms(batch)
        if not isinstance(budget, LearnedBudget) or token_ms_B is None:
            return
        width = batch.num_sampling
        if not width:
            return
        if not self.is_open:
            self._open_steps = 0
            self._gate.skip(width)
            return
        if is_steady and not step.runs_prompts:  # those are read whether the gate is open or not
            self._drafting.observe(num_asked, spent_ms)
        self._open_steps += 1
        if self._open_steps > _FIRST_STEPS and self._open_steps % _EVERY:
            return
        # The root's token is the plain step itself.
        emitted_B = np.array([max(0, len(result.token_ids) - 1) for result in step.results])
        plain_ms = budget.step_ms(batch, 0)
        saved_ms = plain_ms + float(emitted_B @ token_ms_B)
        ms = budget.step_ms(batch, step.trees.num_nodes) + self._drafting.milliseconds(num_asked)
        alone_step_ms = alone_saved_ms = plain_ms
        if copied.num_nodes:
            alone_step_ms, accepted_B = self._alone(budget, step, copied)
            alone_saved_ms += float(accepted_B @ token_ms_B)
        decay = 1.0 - 1.0 / _HORIZON
        self._alone_saved_ms = self._alone_saved_ms * decay + alone_saved_ms
        self._alone_ms = self._alone_ms * decay + alone_step_ms
        # The time in which the corpus alone would have come as much further.
        further_ms = (saved_ms - alone_saved_ms) * self._alone_ms / self._alone_saved_ms
        gained_ms = further_ms - (ms - alone_step_ms)
        self._gate.observe(width, gained_ms, ms)

    def _alone(
        self, budget: LearnedBudget, step: Observation, copied: DraftTrees
    ) -> tuple[float, NDArray[np.float64]]:
        """Milliseconds of the step with the corpus alone, and nodes accepted of each entry.

        Learns how far the corpus is to be believed.
        """
        values_N = self._calibration.corrected(copied.probs_N, copied.sources_N)
        choice, alone, values_N, is_bought_N = budget.bought(step.batch, copied, values_N)
        right_N, known_N = found = agreement(copied, step.results)
        if not is_bought_N.all():
            found = Agreement(right_N[is_bought_N], known_N[is_bought_N])
        accepted_B = accepted_in_hindsight(alone, values_N, step.results, found)
        self._calibration.observe(
            copied.probs_N[known_N], copied.sources_N[known_N], right_N[known_N]
        )
        return choice.step_ms, accepted_B

    def change_policy(self) -> None:
        """The target's or the draft's weights changed."""
        self._calibration.decay()
        self._gate.change_policy()

    def learned(self) -> dict[str, Any]:
        return self._gate.learned()


class Agreement(NamedTuple):
    """The agreement of draft trees with the tokens that were emitted."""

    right_N: NDArray[np.bool_]  # whether the node and all above it are what was emitted
    known_N: NDArray[np.bool_]  # False beyond the last token, and where the request ended


def agreement(trees: DraftTrees, results: Sequence[EntryResult]) -> Agreement:
    """The nodes of trees that are what was emitted, and those of which that is known."""
    entries_N = np.repeat(np.arange(len(results)), np.diff(trees.offsets_B1))
    emitted_BL = np.full((len(results), max(1, int(trees.depths_N.max(initial=0)))), -1)
    for b, result in enumerate(results):
        tokens = result.token_ids[: emitted_BL.shape[1]]
        emitted_BL[b, : len(tokens)] = tokens
    emitted_N = emitted_BL[entries_N, trees.depths_N - 1]
    missed_N = trees.tokens_N != emitted_N
    beyond_N = missed_N & (emitted_N < 0)
    bits_N = _bits(trees, entries_N)
    missed_B, beyond_B = np.zeros((2, len(results)), dtype=np.uint64)
    np.bitwise_or.at(missed_B, entries_N[missed_N], bits_N[missed_N])
    np.bitwise_or.at(beyond_B, entries_N[beyond_N], bits_N[beyond_N])
    right_N = (trees.masks_N & missed_B[entries_N]) == 0
    wrong_N = (trees.masks_N & (missed_B & ~beyond_B)[entries_N]) != 0
    ended_B = np.array([result.finish_reason is not None for result in results], dtype=bool)
    return Agreement(right_N, (right_N | wrong_N) & ~ended_B[entries_N])


def accepted_in_hindsight(
    trees: DraftTrees,
    values_N: NDArray[np.floating],
    results: Sequence[EntryResult],
    found: Agreement,
) -> NDArray[np.float64]:
    """Nodes of each entry's tree that would have been accepted: float64 (B,).

    Where a tree goes on beyond the last token emitted, what follows counts by ``values_N``, the
    probabilities of acceptance; where the request ended nothing follows. ``found``: `agreement` of
    the trees.
    """
    right_N, known_N = found
    entries_N = np.repeat(np.arange(len(results)), np.diff(trees.offsets_B1))
    accepted_B = np.bincount(entries_N[right_N], minlength=len(results)).astype(np.float64)
    lengths_B = np.array([len(result.token_ids) for result in results], dtype=np.int64)
    ended_B = np.array([result.finish_reason is not None for result in results], dtype=bool)
    accepted_B[ended_B] = np.minimum(accepted_B, np.maximum(lengths_B - 1, 0))[ended_B]
    is_last_N = right_N & known_N & (trees.depths_N == lengths_B[entries_N])
    bits_N = _bits(trees, entries_N)
    for node in np.flatnonzero(is_last_N):
        own = slice(*trees.offsets_B1[entries_N[node] : entries_N[node] + 2])
        below = (trees.masks_N[own] & bits_N[node]) != 0
        value = float(values_N[node])
        if value > 0:
            follows = float(values_N[own][below].sum()) / value - 1.0  # itself left out
            accepted_B[entries_N[node]] += follows
    return accepted_B


def _bits(trees: DraftTrees, entries_N: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The bit of each node in the masks of its entry."""
    numbers_N = np.arange(trees.num_nodes) - trees.offsets_B1[entries_N] + 1
    return np.left_shift(np.uint64(1), numbers_N.astype(np.uint64))
