"""The one loop: propose, verify, accept, commit, observe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rollout.engine.draft_corpus import DraftCorpus
from rollout.engine.worker import FinishStep
from rollout.memory.cache import CacheMemory
from rollout.ops import gpu
from rollout.parallel import ModelRanks
from rollout.runner.memory_saver import MemorySaver
from rollout.runner.model_runner import Forwarded
from rollout.sampling.sampler import PendingSamples
from rollout.scheduler.step_limits import StepLimits
from rollout.types import (
    Batch,
    DraftTrees,
    EntryResult,
    Request,
    StepResult,
    StepTimes,
    TokenExtras,
)
from rollout.weights.transaction import WeightTransaction
from spec_workers.budget import DraftBudget, FixedBudget, Verified
from spec_workers.features.feature_recorder import FeatureRecorder
from spec_workers.observation import Observation
from spec_workers.rank_agreement import agreed_times, check_drafts, check_results
from spec_workers.request_stats import count_step
from spec_workers.step_clock import StepClock
from spec_workers.target import TargetWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step between its two halves."""

    batch: Batch
    proposed: DraftTrees | None  # None: nobody was asked
    verified: Verified
    forwarded: Forwarded
    is_steady: bool  # nothing was compiled or captured in the forward's time
    drafting_is_steady: bool  # nor in the time of drafting
    samples: PendingSamples
    clock: StepClock
    draft_ms: float
    launch_ms: float
    expected_accepted: float
    turn: int  # of the worker when it was launched


class SpecWorker:
    """The base of every worker; a subclass says what it proposes and what it observes.

    No speculation is an empty draft: there is no other path through a step.
    """

    supports_overlap = False
    """Whether `propose` may be asked about other requests before it is told, by `observe`, what
    came of its last drafts. Features a forward kept are gone by then."""

    def __init__(
        self, target: TargetWorker, budget: DraftBudget | None = None, *, lockstep: bool = False
    ) -> None:
        """``budget``: how many draft nodes are verified; default: all that are proposed."""
        self.target = target
        self.budget: DraftBudget = budget or FixedBudget()
        self.lockstep = lockstep or target.ranks.rows.size > 1
        self.recorder: FeatureRecorder | None = None
        self.drafting_is_steady = True  # the last step's timing
        self._unlearned: Callable[[], None] | None = None  # what the budget is to learn of a step
        self._turn = 0  # counts steps that were launched or finished
        self._finished_at = 0.0
        # Ranks learn at once: between their steps one may be asked what it learned, others not.
        self._learns_later = gpu.runs_on(self.model_device) and target.ranks.all.size == 1

    @property
    def memory(self) -> CacheMemory:
        return self.target.memory

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def max_context_len(self) -> int:
        return self.target.max_context_len

    @property
    def weights(self) -> WeightTransaction:
        return self.target.weights

    @property
    def residency(self) -> MemorySaver:
        return self.target.residency

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.target.eos_token_ids

    @property
    def model_dtype(self) -> torch.dtype:
        return self.target.model.dtype

    @property
    def model_device(self) -> torch.device:
        return self.target.model.device

    @property
    def limits(self) -> StepLimits:
        return self.target.limits

    @property
    def ranks(self) -> ModelRanks:
        return self.target.ranks

    @property
    def overlaps(self) -> bool:
        """Not with features of a forward that are read when it is finished, nor with ranks that
        wait for each other."""
        return (
            self.supports_overlap
            and self.recorder is None
            and self.memory.routes is None
            and not self.lockstep
            and self.ranks.all.size == 1
        )

    @property
    def max_draft_tokens(self) -> int:
        return 0

    @property
    def draft_corpus(self) -> DraftCorpus | None:
        return None

    def begin_step(self, batch: Batch) -> FinishStep:
        """Propose, verify and sample. Nothing waits for a device.

        Finished, it emits for each sampling entry between one token and its longest path + 1. A
        request whose logits are no distribution ends alone, with FinishReason.ERROR.
        """
        with gpu.on(self.model_device):
            launched = self._launch(batch)

        def finish() -> StepResult:
            with gpu.on(self.model_device):
                return self._finish(launched)

        return finish

    def step(self, batch: Batch) -> StepResult:
        """A whole step."""
        return self.begin_step(batch)()

    def _launch(self, batch: Batch) -> Launched:
        clock = StepClock(self.model_device)
        self.prepare(batch)
        self.drafting_is_steady = True
        floor = self.budget.floor(batch)
        proposed = None if floor is None else self.propose(batch, floor)
        verified = self.budget.choose(batch, proposed)
        if self.target.checks_ranks:
            check_drafts(self.ranks.tensor, batch, verified.trees)
        draft_ms = clock.lap()
        clock.begin_forward()
        forwarded = self.target.verify(batch, verified.trees)
        clock.end_forward()
        samples = self.target.sample(batch, verified.trees, forwarded.logits_RV)
        clock.end_sampling()
        self._learn()  # while a GPU computes
        self._turn += 1
        return Launched(
            batch=batch,
            proposed=proposed,
            verified=verified,
            # Nobody reads logits again: their memory is the next step's.
            forwarded=replace(forwarded, logits_RV=forwarded.logits_RV.new_empty(0)),
            # Kernels were compiled or a graph captured: the timing is not steady-state.
            is_steady=self.target.graphs is None or self.target.graphs.is_warm,
            drafting_is_steady=self.drafting_is_steady,
            samples=samples,
            clock=clock,
            draft_ms=draft_ms,
            launch_ms=clock.lap(),
            expected_accepted=float(verified.values_N.sum()),
            turn=self._turn,
        )

    def _finish(self, step: Launched) -> StepResult:
        batch, verified, clock = step.batch, step.verified, step.clock
        clock.lap()
        samples = step.samples.read()
        waited_ms = clock.lap()
        results = self.target.accept(batch, samples)
        if self.target.checks_ranks:
            check_results(self.ranks.tensor, batch, results)
        self.target.commit(batch, results)
        observation = Observation(
            batch=batch,
            trees=verified.trees,
            was_asked=step.proposed is not None,
            forwarded=step.forwarded,
            results=results,
        )
        if self.recorder is not None:
            self.recorder.observe(observation, self.target.runner.features, self.weights.version)
        forward_ms = clock.forward()
        sample_ms = max(0.0, step.launch_ms + waited_ms + clock.lap() - forward_ms)
        self.observe(observation)
        times = StepTimes(
            draft=step.draft_ms + clock.lap(),
            forward=forward_ms,
            sample=sample_ms,
            waited=waited_ms,
        )
        if self._turn != step.turn and gpu.runs_on(self.model_device):
            self._uncover(times, clock)
        times = agreed_times(self.ranks.tensor, times)
        self._turn += 1
        self._finished_at = time.perf_counter()
        self._learn()
        self._unlearned = partial(self._learn_from, step, results, times)
        if not self._learns_later:
            self._learn()
        return StepResult(
            entries=results,
            weight_version=self.weights.version,
            num_query_tokens=batch.num_run_tokens + verified.trees.num_nodes,
            num_proposed=0 if step.proposed is None else step.proposed.num_nodes,
            expected_accepted=step.expected_accepted,
            forecast=verified.forecast,
            times=times,
        )

    def _uncover(self, times: StepTimes, clock: StepClock) -> None:
        """With overlap, charge only host time that the device did not hide.

        Drafting is the part that could be spared."""
        times.sample = clock.sampling()
        turn_ms = (time.perf_counter() - self._finished_at) * 1e3
        times.draft = min(times.draft, max(0.0, turn_ms - times.forward - times.sample))

    def _learn_from(self, step: Launched, results: list[EntryResult], times: StepTimes) -> None:
        """Tell the budget what the step cost and gave, and book its share to each request."""
        learned = replace(
            times,
            forward=times.forward if step.is_steady else math.nan,
            draft=times.draft if step.drafting_is_steady else math.nan,
        )
        self.budget.observe(step.batch, step.verified, results, learned)
        if not self._learns_later:
            times.draft += step.clock.lap()
        count_step(step.batch, step.proposed, step.verified, results, times)

    def _learn(self) -> None:
        """Learn what the last step cost and gave: on a GPU when the next one is under way there, or
        when somebody asks before."""
        unlearned, self._unlearned = self._unlearned, None
        if unlearned is not None:
            unlearned()

    def prepare(self, batch: Batch) -> None:
        """Called first in each step, whether anything is proposed in it or not."""

    def propose(self, batch: Batch, floor: float) -> DraftTrees:
        """Draft nodes, each entry's most probable ones first, none less probable than ``floor``."""
        raise TypeError(f"{type(self).__name__} does not say what it proposes")

    def observe(self, step: Observation) -> None:
        """Take note of the nodes that were verified, and of what came of them."""

    def release(self, request: Request) -> None:
        """The request ended."""
        self._learn()
        self.budget.forget(request)
        if self.recorder is not None:
            self.recorder.release(request)

    def record(self, recorder: FeatureRecorder) -> None:
        """Keep features of what is rolled out from the next step on, whatever is drafted."""
        self.target.runner.features |= recorder.ring.features
        self.recorder = recorder

    def score(self, request: Request, output_ids: list[int]) -> tuple[list[float], TokenExtras]:
        with gpu.on(self.model_device):
            return self.target.score(request, output_ids)

    def accompany_scoring(self) -> None:
        self.target.accompany_scoring()

    def weights_changed(self) -> None:
        self._learn()
        self.budget.change_policy()

    def begin(self, learned: Mapping[str, Any]) -> None:
        """Go on from what an earlier engine learned. Raises ValueError for what is none of it."""
        self._learn()
        self.budget.restore(learned)

    def learned(self) -> dict[str, Any]:
        self._learn()
        return self.budget.learned()

    def counters(self) -> dict[str, float]:
        versions = self.weights.versions.items()
        counters = self.target.counters()
        counters |= {f"weights/{part}": version for part, version in versions}
        if self.recorder is not None:
            kept = self.recorder.counters()
            counters |= {f"features/{name}": value for name, value in kept.items()}
        return counters
