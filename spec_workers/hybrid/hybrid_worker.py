"""NGRAM and a neural draft together: one tree from what both propose.

Legend: B entries of a batch, N draft nodes, G nodes of the n-gram trees.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rollout.config import EngineConfig
from rollout.models.checkpoint import Progress
from rollout.parallel import follows
from rollout.types import Batch, DraftTrees, Request
from spec_workers.budget import DraftBudget
from spec_workers.corpus.ngram_corpus import NgramCorpus
from spec_workers.draft_tree import indices_within, only_roots
from spec_workers.hybrid.neural_gate import NeuralGate
from spec_workers.hybrid.tree_merge import merge_trees
from spec_workers.neural.draft_factory import open_chain, open_eagle
from spec_workers.neural.drafter import NeuralDrafter
from spec_workers.ngram import SOURCES, NgramWorker, open_corpus
from spec_workers.options import HybridOptions, takes
from spec_workers.step.observation import Observation
from spec_workers.target import TargetWorker

_LONG = 4
_SURE = 0.6
"""The draft is not asked where the corpus has a path of `_LONG` tokens that is accepted with this
probability: it would add little, and each of its levels is a forward."""


def hybrid_sources(neural: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the values of ``sources_N``: those of the corpus, the draft's, and of both."""
    return (*SOURCES, *neural, *(f"ngram+{source}" for source in neural))


class HybridWorker(NgramWorker):
    """Proposes the most probable nodes of the corpus's trees and of a neural draft's.

    A node that both propose has a source of its own, so that the budget learns what agreement is
    worth. The draft is asked about requests for which the corpus has no long, likely path, and
    about none while it does not pay beside the corpus.
    """

    def __init__(
        self,
        target: TargetWorker,
        draft_corpus: NgramCorpus,
        drafter: NeuralDrafter,
        *,
        num_draft_tokens: int,
        calibration_seconds: float,
        budget: DraftBudget,
    ) -> None:
        super().__init__(
            target,
            draft_corpus,
            num_draft_tokens=num_draft_tokens,
            calibration_seconds=calibration_seconds,
            budget=budget,
        )
        self.drafter = drafter
        self.lockstep = self.lockstep or drafter.lockstep
        self._num_sources = (len(SOURCES), len(drafter.sources))
        self._gate = NeuralGate(budget, SOURCES)
        self._copied = only_roots(0)  # the n-gram trees of this step
        self._index_G = np.zeros(0, dtype=np.int64)  # where their nodes are in what was proposed
        self._asked_now = 0  # requests the draft was asked about in this step
        self._asked = self._skipped = 0

    def prepare(self, batch: Batch) -> None:
        self._gate.begin_step(batch)
        super().prepare(batch)

    def propose(self, batch: Batch, floors_B: NDArray[np.float64]) -> DraftTrees:
        copied = self._copied = super().propose(batch, floors_B)
        self._index_G = indices_within(np.diff(copied.offsets_B1))
        if not self._gate.is_open:
            return copied
        samples_B = np.array([entry.samples for entry in batch.entries], dtype=bool)
        samples_B &= floors_B <= 1.0
        undecided = np.flatnonzero(samples_B & ~_has_sure_path(copied))
        self._asked_now = undecided.size
        self._asked += undecided.size
        self._skipped += int(samples_B.sum()) - undecided.size
        if not undecided.size and not self.lockstep:
            return copied
        with self._gate.timed():
            grown = self.drafter.propose(
                batch,
                floors_B,
                frozenset(undecided.tolist()),
                token_ms_B=self.budget.token_ms(batch),
            )
        self.drafting_is_steady = self.drafter.is_warm
        if not grown.num_nodes:
            return copied
        merged = merge_trees(
            copied,
            grown,
            limits_B=np.array(self._limits(batch.entries), dtype=np.int64),
            floor=float(floors_B.min()),
            num_sources=self._num_sources,
        )
        self._index_G = merged.index_G
        return merged.trees

    def observe(self, step: Observation) -> None:
        super().observe(step)
        if self.budget.is_open and self._gate.is_open:
            with self._gate.timed():
                self.drafter.observe(step)
            self.drafting_is_steady &= self.drafter.is_warm
        elif step.runs_prompts:
            self.drafter.observe(step, prompts_alone=True)
        if self.budget.is_open:
            copied = self._copied if step.was_asked else only_roots(len(step.results))
            self._gate.judge(step, copied, self._asked_now, is_steady=self.drafting_is_steady)

    def _num_verified(self, step: Observation) -> list[int]:
        if not self._copied.num_nodes:
            return [0] * len(step.results)
        copied_B, verified_B = np.diff(self._copied.offsets_B1), np.diff(step.trees.offsets_B1)
        entries_G = np.repeat(np.arange(copied_B.size), copied_B)
        is_out_G = (self._index_G < 0) | (self._index_G >= verified_B[entries_G])
        first_out_B = copied_B.copy()
        np.minimum.at(first_out_B, entries_G[is_out_G], indices_within(copied_B)[is_out_G])
        return first_out_B.tolist()

    def release(self, request: Request) -> None:
        super().release(request)
        self.drafter.release(request)

    def check_integrity(self, running: Iterable[Request]) -> None:
        super().check_integrity(running)
        self.drafter.check_integrity(running)

    def weights_changed(self) -> None:
        super().weights_changed()
        self.drafter.weights_changed()
        self._gate.change_policy()

    def counters(self) -> dict[str, float]:
        gate = self._gate.learned()
        own = {
            "hybrid/asked": self._asked,
            "hybrid/skipped": self._skipped,
            "hybrid/is_open": float(gate["open"]),
            "hybrid/gain": gate["gain"],
        }
        return super().counters() | self.drafter.counters() | own


def _has_sure_path(trees: DraftTrees) -> NDArray[np.bool_]:
    count = trees.offsets_B1.size - 1
    if not trees.num_nodes:
        return np.zeros(count, dtype=bool)
    is_sure_N = (trees.depths_N >= _LONG) & (trees.probs_N >= _SURE)
    entries_N = np.repeat(np.arange(count), np.diff(trees.offsets_B1))
    return np.bincount(entries_N[is_sure_N], minlength=count) > 0


@takes(HybridOptions)
def build(
    config: EngineConfig, progress: Progress | None, options: HybridOptions
) -> HybridWorker | TargetWorker:
    """A worker with a corpus and a neural draft; of a rank that follows, its target.

    ``progress`` is told how far the target's weights are read. Raises what the builds of
    `spec_workers.ngram`, `spec_workers.eagle` and `spec_workers.mtp` do.
    """
    open_draft = open_chain if options.draft_path is None else open_eagle
    open_models = partial(open_draft, config, progress, options)
    if follows(config.parallel):
        return open_models().target
    corpus, models = open_corpus(config, options), open_models()
    target, drafter = models.target, models.drafter(config, options)
    worker = HybridWorker(
        target,
        corpus,
        drafter,
        num_draft_tokens=options.num_draft_tokens,
        calibration_seconds=options.calibration_seconds,
        budget=options.make_budget(config, target, hybrid_sources(drafter.sources)),
    )
    worker.record(options.recorder(target, drafter.features))
    return worker
