"""The one loop: propose, verify, accept, commit, observe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.engine.draft_corpus import DraftCorpus
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.ops import gpu
from rollout.runner.model_runner import Forwarded
from rollout.types import (
    Batch,
    DraftTrees,
    EntryResult,
    Request,
    StepResult,
    StepTimes,
    TokenExtras,
)
from spec_workers.budget import DraftBudget, FixedBudget, SelectedDrafts
from spec_workers.budget.cost_run import calibrate
from spec_workers.draft_tree import only_roots
from spec_workers.features.feature_recorder import FeatureRecorder
from spec_workers.step.learning import StepLearning
from spec_workers.step.observation import Observation
from spec_workers.step.timer import SteadyPhases, StepTimer
from spec_workers.target import TargetWorker


class SpecWorker:
    """The base of every worker; a subclass says what it proposes and what it observes.

    No speculation is an empty draft: there is no other path through a step.
    """

    def __init__(
        self,
        target: TargetWorker,
        budget: DraftBudget | None = None,
        *,
        lockstep: bool = False,
        calibration_seconds: float = 0.0,
    ) -> None:
        """``budget``: how many draft nodes are verified; default: all that are proposed. For the
        others see `SpecOptions`."""
        self.target = target
        # The parts of the target that the protocol `Worker` names.
        self.memory = target.memory
        self.memory_saver = target.memory_saver
        self.weights = target.weights
        self.ranks = target.ranks
        self.limits = target.limits
        self.vocab_size = target.vocab_size
        self.max_context_len = target.max_context_len
        self.eos_token_ids = target.eos_token_ids
        self.model_dtype, self.model_device = target.model_dtype, target.model_device
        self.budget: DraftBudget = budget or FixedBudget()
        self.lockstep = lockstep or target.ranks.rows.size > 1
        self.recorder: FeatureRecorder | None = None
        self._calibration_seconds = calibration_seconds
        self.drafting_is_steady = True  # the timing of the last step's drafts
        self._learning = StepLearning(self.budget, is_deferred=gpu.runs_on(self.model_device))

    @property
    def max_draft_tokens(self) -> int:
        """Draft nodes one request may ask for in the next step, the root excluded."""
        return 0

    @property
    def draft_corpus(self) -> DraftCorpus | None:
        """The corpus it drafts from and learns into; None for a worker without one."""
        return None

    def step(self, batch: Batch) -> StepResult:
        """Propose, verify, sample, accept, commit and observe.

        Each sampling entry emits between one token and its longest path + 1. A request whose logits
        are no distribution ends alone, with FinishReason.ERROR.
        """
        with gpu.on(self.model_device):
            timer = StepTimer(self.model_device)
            with timer.drafting():
                selected = self._draft(batch)
            with timer.forward():
                forwarded, samples = self.target.verify(batch, selected.trees)
            self._learning.catch_up()  # while a GPU computes
            sampled = samples.read()
            self.ranks.all.require_all()
            results = self.target.entry_results(batch, sampled)
            self.target.commit(batch, results)
            step = self._observation(batch, selected, forwarded, results)
            with timer.drafting():
                self.observe(step)
        times, steady = timer.end(), self._steady_phases()
        times.draft += self._learning.expected_ms(selected)
        self._learning.observe(batch, selected, results, times, steady)
        return self._result(batch, selected, results, times)

    def check_idle(self) -> None:
        """Run a step of no requests, as a rank does while others in lockstep with it have some.

        Before the first real step: a network or kernel that cannot take no rows fails here, on its
        own, and not in the middle of a run while other ranks wait for it in the same forward.
        """
        self.step(Batch(step=0, entries=[]))

    def _draft(self, batch: Batch) -> SelectedDrafts:
        self.budget.begin_step(batch)
        self.prepare(batch)
        self.drafting_is_steady = True
        floors_B = self.budget.floors(batch)
        if floors_B is not None and self.budget.wants_plain_step():
            floors_B = None
        proposed = None if floors_B is None else self.propose(batch, floors_B)
        return self.budget.choose(batch, proposed)

    def _steady_phases(self) -> SteadyPhases:
        """Whether the phases of this step were steady-state, with nothing compiled or
        captured."""
        graphs = self.target.graphs
        return SteadyPhases(
            forward=graphs is None or graphs.is_warm, drafting=self.drafting_is_steady
        )

    def _observation(
        self,
        batch: Batch,
        selected: SelectedDrafts,
        forwarded: Forwarded,
        results: list[EntryResult],
    ) -> Observation:
        """The step as `observe` is told of it, its features recorded."""
        step = Observation(
            batch=batch,
            trees=selected.trees,
            was_asked=selected.proposed is not None,
            forwarded=forwarded,
            results=results,
        )
        if self.recorder is not None:
            self.recorder.observe(step, self.target.runner.features, self.weights.version)
        return step

    def _result(
        self, batch: Batch, selected: SelectedDrafts, results: list[EntryResult], times: StepTimes
    ) -> StepResult:
        return StepResult(
            entries=results,
            weight_version=self.weights.version,
            num_query_tokens=batch.num_run_tokens + selected.trees.num_nodes,
            num_proposed=0 if selected.proposed is None else selected.proposed.num_nodes,
            expected_accepted=float(selected.values_N.sum()),
            forecast=selected.forecast,
            times=times,
        )

    def prepare(self, batch: Batch) -> None:
        """Called first in each step, whether anything is proposed in it or not."""

    def propose(self, batch: Batch, floors_B: NDArray[np.float64]) -> DraftTrees:
        """Draft nodes, each entry's most probable ones first.

        ``floors_B``: less probable nodes of each entry will not be verified: of an entry whose
        floor is above 1, none.
        """
        return only_roots(len(batch.entries))

    def observe(self, step: Observation) -> None:
        """Take note of the nodes that were verified, and of what came of them."""

    def release(self, request: Request) -> None:
        self._learning.catch_up()
        self.budget.forget(request)
        if self.recorder is not None:
            self.recorder.release(request)

    def record(self, recorder: FeatureRecorder | None) -> None:
        """Record features of what is rolled out from the next step on, whatever is drafted."""
        if recorder is not None:
            self.target.runner.features |= recorder.ring.features
        self.recorder = recorder

    def score(
        self,
        request: Request,
        output_ids: list[int],
        observe: Callable[[torch.Tensor], object] | None = None,
    ) -> tuple[list[float], TokenExtras]:
        """Logprobs of given tokens after the request's own. See `TargetWorker.score`."""
        with gpu.on(self.model_device):
            return self.target.score(request, output_ids, observe)

    @contextmanager
    def without_speculation(self) -> Iterator[SpecWorker]:
        """The base itself, whose empty drafts are plain decoding; its forwards keep no features."""
        runner = self.target.runner
        features, runner.features = runner.features, AuxHiddenStates()
        try:
            yield SpecWorker(self.target, lockstep=self.lockstep)
        finally:
            runner.features = features

    def score_idle(self) -> None:
        """Join other ranks' scoring forwards with an empty batch."""
        self.target.score_idle()

    def weights_changed(self) -> None:
        self._learning.catch_up()
        self.budget.change_policy()

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises IntegrityError; see `Worker.check_integrity`."""
        self.memory.check_integrity()

    def calibrate(self) -> None:
        """Time a few forwards, where drafts are chosen by what steps cost; in lockstep run one
        that is idle."""
        if self.lockstep:
            self.check_idle()
        calibrate(self.target, self.budget, self._calibration_seconds)

    def learned(self) -> dict[str, Any]:
        self._learning.catch_up()
        return self.budget.learned()

    def counters(self) -> dict[str, float]:
        versions = self.weights.versions.items()
        counters = self.target.counters()
        counters |= {f"weights/{part}": version for part, version in versions}
        counters |= {f"weights/{name}": count for name, count in self.weights.num_tensors.items()}
        if self.recorder is not None:
            recorded = self.recorder.counters()
            counters |= {f"features/{name}": value for name, value in recorded.items()}
        return counters
