"""The options of workers, checked before a model is loaded, which may take minutes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any, Self, TypeVar

from rollout.config import EngineConfig, ParallelMode
from rollout.errors import InvalidInputError
from rollout.hub import model_folder
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.checkpoint import Progress
from rollout.types import MAX_TREE_NODES
from rollout.validation import checked_int, checked_member, checked_number
from spec_workers.budget import BudgetKind, DraftBudget, FixedBudget, LearnedBudget
from spec_workers.corpus.options import CorpusOptions
from spec_workers.features.feature_recorder import FeatureRecorder, FeatureRingOptions
from spec_workers.target import TargetWorker


@dataclass(frozen=True, kw_only=True)
class SpecOptions:
    """The options of every worker that drafts. conf/spec/*.yaml has them with each worker's own.

    Args:
        num_draft_tokens: most draft nodes per request and step, the root excluded. Elsewhere
            speculative_num_draft_tokens, which counts the root too.
        budget: ``learned``: as many of them as pay, none where none do. ``fixed``: all of them.
        min_probability: nodes less likely to be accepted are never drafted.
        calibration_seconds: for timing a few forwards as the engine starts, where no earlier run
            left its cost curve; 0: none, the curve is learned from the steps alone.

    Raises InvalidInputError, naming the option.
    """

    num_draft_tokens: int = 16
    budget: str = BudgetKind.LEARNED
    min_probability: float = 0.02
    calibration_seconds: float = 0.4

    def __post_init__(self) -> None:
        checked_member(self.budget, "spec.budget", BudgetKind)
        checked_number(self.min_probability, "spec.min_probability", maximum=1)
        checked_number(self.calibration_seconds, "spec.calibration_seconds", maximum=3600)
        checked_int(self.num_draft_tokens, "spec.num_draft_tokens", maximum=MAX_TREE_NODES - 1)

    def on_this_machine(self) -> Self:
        """The options as the machine that runs the worker has them: a draft's folder, not its name
        on the hub. Raises InvalidInputError where there is none. `NgramCorpus` looks for its own
        files."""
        return self

    def runs_in_lockstep(self, config: EngineConfig) -> bool:
        """Whether every step enters the same forwards, whatever the batch."""
        return False

    def make_budget(
        self,
        config: EngineConfig,
        target: TargetWorker,
        sources: Sequence[str],
    ) -> DraftBudget:
        """The budget of a worker. ``sources``: names of the values of ``DraftTrees.sources_N``.

        Ranks in lockstep verify all that is proposed: their steps may not depend on a rank's batch.
        """
        if self.budget == BudgetKind.FIXED or self.runs_in_lockstep(config):
            return FixedBudget(self.min_probability)
        return LearnedBudget.for_target(target, sources, self.min_probability)


@dataclass(frozen=True, kw_only=True)
class NgramOptions(CorpusOptions, SpecOptions):
    """The options of a worker with a corpus: those of every worker, and the corpus's."""

    def __post_init__(self) -> None:
        SpecOptions.__post_init__(self)
        CorpusOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class NeuralOptions(SpecOptions):
    """The options of a worker with a neural draft, beside those of every worker.

    Args:
        draft_path: the folder of an EAGLE or block draft or of an MTP chain, or its name on the
            hub; default: the chain of the target's own checkpoint.
        num_steps: depth of a draft tree; default: 4 of an EAGLE draft, of a block as many as it
            guesses, of a chain as many as it has networks. Beyond those the last one is run again,
            with keys and values of its own. Elsewhere: speculative_num_steps.
        topk: most children of a node, and most nodes of a level that are expanded; 1: a chain of
            tokens. Default: 4 of an EAGLE draft, 1 of an MTP chain. Elsewhere:
            speculative_eagle_topk.
        frozen: a trainer's stream to selector ``all`` leaves the draft alone. Only a trainer that
            sends the draft with the target, by the checkpoint's names, wants it otherwise.
        lockstep: run the same forwards in every step, whatever the batch, so that ranks with
            collectives in them stay together; the budget is fixed then.
        feature_ring: `FeatureRingOptions`: record what the draft reads, for draft training.

    Raises InvalidInputError, naming the option.
    """

    draft_path: str | None = None
    num_steps: int | None = None
    topk: int | None = None
    frozen: bool = True
    lockstep: bool = False
    feature_ring: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is not None:
            _check_count("num_steps", self.num_steps)
        FeatureRingOptions.of(self.feature_ring)

    def on_this_machine(self) -> Self:
        if not self.draft_path:
            return self
        folder = model_folder(self.draft_path, "spec.draft_path")
        if not Path(folder).is_dir():
            raise InvalidInputError("spec.draft_path", folder, "there is no such folder")
        return replace(self, draft_path=folder)

    def runs_in_lockstep(self, config: EngineConfig) -> bool:
        return self.lockstep or config.parallel.mode is ParallelMode.lockstep

    def recorder(self, target: TargetWorker, drafted: AuxHiddenStates) -> FeatureRecorder | None:
        """The recorder of what the draft reads; None where nothing is recorded."""
        return FeatureRingOptions.of(self.feature_ring).recorder(target, drafted)


@dataclass(frozen=True, kw_only=True)
class EagleOptions(NeuralOptions):
    """The options of an EAGLE draft, which is always in a folder of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.draft_path:
            raise InvalidInputError(
                "spec.draft_path", self.draft_path,
                "must name the folder of an EAGLE or block draft of the target; `specrollout "
                "train-draft` makes one",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HybridOptions(NeuralOptions, NgramOptions):
    """The options of a worker with a corpus and a neural draft: those of both."""


Options = TypeVar("Options", bound=SpecOptions)
Built = TypeVar("Built")


def takes(
    options: type[Options],
) -> Callable[[Callable[[EngineConfig, Progress | None, Options], Built]], Callable[..., Built]]:
    """Make a worker's `build` take these options as keyword arguments, as conf/spec names them."""

    def decorated(
        build: Callable[[EngineConfig, Progress | None, Options], Built],
    ) -> Callable[..., Built]:
        @wraps(build)
        def built(config: EngineConfig, progress: Progress | None = None, **given: Any) -> Built:
            return build(config, progress, options(**given).on_this_machine())

        def check(**given: Any) -> None:
            options(**given)

        named = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
            for field in fields(options)
        ]
        config, progress, _ = inspect.signature(build).parameters.values()
        built.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [config, progress.replace(default=None), *named]
        )
        built.check = check  # type: ignore[attr-defined]
        return built

    return decorated


def _check_count(name: str, value: object) -> None:
    checked_int(value, f"spec.{name}", minimum=1, maximum=MAX_TREE_NODES - 1)


def check_topk(topk: object, num_steps: int) -> None:
    """Raise InvalidInputError unless the nodes that are expanded fit an ancestor mask."""
    maximum = (MAX_TREE_NODES - 1) // max(1, num_steps - 1)
    _check_count("topk", topk)
    if isinstance(topk, int) and topk > maximum:
        raise InvalidInputError(
            "spec.topk", topk,
            f"topk * (num_steps - 1) nodes are expanded, at most {MAX_TREE_NODES - 1}: with "
            f"num_steps={num_steps} it can be {maximum} at most",
        )  # fmt: skip
