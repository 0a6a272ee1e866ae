"""Whether a neural draft pays beside the corpus, which costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from spec_workers.budget import DraftBudget, LearnedBudget
from spec_workers.budget.gate import Gate
from spec_workers.observation import Observation


class NeuralGate:
    """Opens and closes by what the draft's own nodes spared and what running it took.

    The corpus's nodes are there without it, so what counts is what it alone thought of. With a
    budget that does not learn what steps cost it is always open.
    """

    def __init__(self, budget: DraftBudget, first: int, last: int) -> None:
        """The sources in [first, last) are those of the draft alone."""
        self._budget = budget
        self._first, self._last = first, last
        self._gate = Gate()
        self._spent_ms = 0.0  # in the step in hand

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

    def judge(self, step: Observation) -> None:
        """At the end of a step, in which the draft ran if the gate was open."""
        spent_ms, self._spent_ms = self._spent_ms, 0.0
        sampling = [entry for entry in step.batch.entries if entry.samples]
        budget = self._budget
        if not sampling or not isinstance(budget, LearnedBudget) or not budget.cost.is_known:
            return
        if not self.is_open:
            self._gate.skip(len(sampling))
            return
        longest = max(entry.end for entry in step.batch.entries)
        plain_ms = float(budget.cost.of_decoding(len(sampling), longest)[-1])
        spared_ms = self._num_accepted(step) * plain_ms / len(sampling)
        self._gate.observe(len(sampling), spared_ms - spent_ms, plain_ms)

    def _num_accepted(self, step: Observation) -> int:
        accepted = [
            int(first) - 1 + node
            for first, result in zip(step.trees.offsets_B1[:-1], step.results, strict=True)
            for node in result.path
        ]
        sources = step.trees.sources_N[np.array(accepted, dtype=np.intp)]
        return int(((sources >= self._first) & (sources < self._last)).sum())

    def change_policy(self) -> None:
        self._gate.change_policy()
