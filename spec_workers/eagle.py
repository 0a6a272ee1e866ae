"""EAGLE: drafts by a small network that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.config import EngineConfig, ParallelMode
from rollout.errors import InvalidInputError
from rollout.models.eagle.loader import load_eagle, read_eagle_spec, tensors_for
from rollout.models.loader import Progress
from rollout.models.spec import ModelSpec
from rollout.types import MAX_TREE_NODES, Batch, DraftTrees, Request
from rollout.weights.disk import CheckpointSource
from spec_workers.budget import DraftBudget, FixedBudget, LearnedBudget
from spec_workers.budget.cost_run import calibrate
from spec_workers.draft_sizing import draft_bytes
from spec_workers.features.feature_recorder import FeatureRingOptions
from spec_workers.neural.device_proposal import proposal_graphs
from spec_workers.neural.drafter import Drafter
from spec_workers.neural.eagle_drafter import EagleDrafter
from spec_workers.observation import Observation
from spec_workers.options import check_budget, check_number, check_topk
from spec_workers.target import TargetWorker
from spec_workers.worker import SpecWorker


class EagleWorker(SpecWorker):
    """Proposes what a neural draft thinks of."""

    def __init__(
        self,
        target: TargetWorker,
        drafter: Drafter,
        *,
        budget: DraftBudget,
        calibration_seconds: float = 0.0,
    ) -> None:
        """See `build` for the options. The target must compute what the drafter reads."""
        super().__init__(target, budget, lockstep=drafter.lockstep)
        self.drafter = drafter
        self._calibration_seconds = calibration_seconds
        if self.lockstep:
            self.check_idle()

    @property
    def max_draft_tokens(self) -> int:
        return self.drafter.max_draft_tokens if self.budget.is_open else 0

    def propose(self, batch: Batch, floor: float) -> DraftTrees:
        trees = self.drafter.propose(batch, floor)
        self.drafting_is_steady = self.drafter.is_warm
        return trees

    def observe(self, step: Observation) -> None:
        if self.budget.is_open:
            self.drafter.observe(step)
        elif step.runs_prompts:
            self.drafter.observe(step, prompts_alone=True)

    def begin(self, learned: Mapping[str, Any]) -> None:
        super().begin(learned)
        calibrate(self.target, self.budget, self._calibration_seconds)

    def release(self, request: Request) -> None:
        super().release(request)
        self.drafter.release(request)

    def weights_changed(self) -> None:
        super().weights_changed()
        self.drafter.weights_changed()

    def counters(self) -> dict[str, float]:
        return super().counters() | self.drafter.counters()


def build(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    draft_path: str | None = None,
    num_steps: int = 4,
    topk: int = 4,
    num_draft_tokens: int = 16,
    budget: str = "learned",
    min_probability: float = 0.02,
    calibration_seconds: float = 1.0,
    frozen: bool = True,
    lockstep: bool = False,
    feature_ring: Mapping[str, Any] | None = None,
) -> EagleWorker:
    """A worker with an EAGLE, EAGLE-2 or EAGLE-3 draft: its checkpoint decides which.

    Args:
        progress: told how far the target's weights are read.
        draft_path: the draft's folder.
        num_steps: depth of a draft tree. Elsewhere: speculative_num_steps.
        topk: most children of a node, and most nodes of a level that are expanded; 1: chains.
            Elsewhere: speculative_eagle_topk.
        num_draft_tokens: most draft nodes per request and step, the root excluded. Elsewhere
            speculative_num_draft_tokens, which counts the root too.
        budget: ``learned``: as many as pay, none where none do. ``fixed``: as many as there are.
        min_probability: nodes less likely to be accepted are never drafted.
        calibration_seconds: for timing a few forwards as the engine starts, where no earlier run
            left its cost curve; 0: none, the curve is learned from the steps alone.
        frozen: a trainer's stream to selector ``all`` leaves the draft alone.
        lockstep: run the same forwards in every step, whatever the batch, so that ranks with
            collectives in them stay together; the budget is fixed then.
        feature_ring: `FeatureRingOptions`: keep what the draft reads, for whoever trains it.

    Raises InvalidInputError, naming the option; CheckpointError and UnsupportedModelError for a
    draft that cannot be read.
    """
    # Before the model, which may take minutes to load: mistakes show at once.
    check_budget(budget)
    lockstep = lockstep or config.parallel.mode is ParallelMode.lockstep
    check_number("min_probability", min_probability, 1)
    check_number("calibration_seconds", calibration_seconds, 3600)
    recording = FeatureRingOptions.of(feature_ring)
    target, drafter = open_eagle(
        config,
        progress,
        draft_path=draft_path,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        frozen=frozen,
        lockstep=lockstep,
    )
    worker = EagleWorker(
        target,
        drafter,
        budget=(
            FixedBudget(min_probability)
            if lockstep or budget == "fixed"
            else LearnedBudget.for_target(target, drafter.sources, min_probability)
        ),
        calibration_seconds=calibration_seconds,
    )
    recorder = recording.recorder(target, drafter.features)
    if recorder is not None:
        worker.record(recorder)
    return worker


def open_eagle(
    config: EngineConfig,
    progress: Progress | None,
    *,
    draft_path: str | None,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    frozen: bool,
    lockstep: bool,
) -> tuple[TargetWorker, EagleDrafter]:
    """A target and a draft that reads it, whose weights and KV are the target's to look after.

    See `build` for the options, and for what is raised, before the target is loaded.
    """
    check_number("num_draft_tokens", num_draft_tokens, MAX_TREE_NODES - 1, int)
    check_number("num_steps", num_steps, MAX_TREE_NODES - 1, int, minimum=1)
    check_topk(topk, num_steps)
    if not draft_path:
        raise InvalidInputError(
            "spec.draft_path", draft_path,
            "must name the folder of an EAGLE draft of the target; `specrollout train-draft` "
            "makes one",
        )  # fmt: skip
    target_spec = ModelSpec.read(Path(config.model.path), config.model.max_context_len)
    draft_spec = read_eagle_spec(draft_path, target_spec)
    target = TargetWorker(
        config,
        progress,
        features=draft_spec.features,
        draft_nodes=num_draft_tokens,
        draft_bytes=draft_bytes(
            config, target_spec, draft_spec, slots_per_request=topk * (num_steps - 1)
        ),
    )
    model = load_eagle(draft_path, target.model)
    drafter = EagleDrafter(
        target,
        model,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        lockstep=lockstep,
        graphs=proposal_graphs(config.memory, target),
    )
    target.weights.parts.add(
        "draft",
        model,
        frozen=frozen,
        reader=lambda folder, parts: CheckpointSource.named(
            *tensors_for(folder, model, target.model)
        ),
    )
    target.residency.add_kv_pool(drafter.runner.kv.pool)
    return target, drafter
