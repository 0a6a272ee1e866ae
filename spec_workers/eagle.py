"""EAGLE: drafts by a small network that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rollout.config import EngineConfig
from rollout.models.checkpoint import Progress
from rollout.types import Batch, DraftTrees, Request
from spec_workers.budget import DraftBudget
from spec_workers.neural.draft_factory import NeuralModels, open_eagle
from spec_workers.neural.drafter import NeuralDrafter
from spec_workers.options import EagleOptions, NeuralOptions, takes
from spec_workers.spec_worker import SpecWorker
from spec_workers.step.observation import Observation
from spec_workers.target import TargetWorker


class EagleWorker(SpecWorker):
    """Speculative worker with a neural draft: an EAGLE network, or a chain of MTP networks."""

    def __init__(
        self,
        target: TargetWorker,
        drafter: NeuralDrafter,
        *,
        budget: DraftBudget,
        calibration_seconds: float = 0.0,
    ) -> None:
        """See `NeuralOptions`. The target must compute what the drafter reads."""
        super().__init__(
            target, budget, lockstep=drafter.lockstep, calibration_seconds=calibration_seconds
        )
        self.drafter = drafter

    @classmethod
    def of(
        cls, models: NeuralModels, config: EngineConfig, options: NeuralOptions
    ) -> EagleWorker | TargetWorker:
        """The worker of a target and a draft, as the options say; of a rank that follows, the
        target."""
        target = models.target
        if target.follows:
            return target
        drafter = models.drafter(config, options)
        worker = cls(
            target,
            drafter,
            budget=options.make_budget(config, target, drafter.sources),
            calibration_seconds=options.calibration_seconds,
        )
        worker.record(options.recorder(target, drafter.features))
        return worker

    @property
    def max_draft_tokens(self) -> int:
        return self.drafter.max_draft_tokens if self.budget.may_draft else 0

    def propose(self, batch: Batch, floors_B: NDArray[np.float64]) -> DraftTrees:
        trees = self.drafter.propose(batch, floors_B, token_ms_B=self.budget.token_ms(batch))
        self.drafting_is_steady = self.drafter.is_warm
        return trees

    def observe(self, step: Observation) -> None:
        if self.budget.is_open:
            self.drafter.observe(step)
            self.drafting_is_steady &= self.drafter.is_warm
        elif step.runs_prompts:
            self.drafter.observe(step, prompts_alone=True)

    def release(self, request: Request) -> None:
        super().release(request)
        self.drafter.release(request)

    def check_integrity(self, running: Iterable[Request]) -> None:
        super().check_integrity(running)
        self.drafter.check_integrity(running)

    def weights_changed(self) -> None:
        super().weights_changed()
        self.drafter.weights_changed()

    def counters(self) -> dict[str, float]:
        return super().counters() | self.drafter.counters()


@takes(EagleOptions)
def build(
    config: EngineConfig, progress: Progress | None, options: EagleOptions
) -> EagleWorker | TargetWorker:
    """A worker with an EAGLE, EAGLE-2 or EAGLE-3 draft: its checkpoint decides which.

    ``progress`` is told how far the target's weights are read. Raises InvalidInputError, naming the
    option; CheckpointError and UnsupportedModelError for a draft that cannot be read.
    """
    return EagleWorker.of(open_eagle(config, progress, options), config, options)
