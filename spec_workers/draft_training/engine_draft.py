"""An engine's draft: read as a trainable one, and swapped for a new one between two steps.

Legend: D draft vocabulary, V the target's vocabulary, E hidden.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch

from rollout.config import ParallelMode
from rollout.engine.engine import RolloutEngine
from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError
from rollout.models.causal_lm import CausalLM
from rollout.models.eagle.dflash import DFlash
from rollout.models.eagle.eagle3 import Eagle3
from spec_workers.draft_training.block_draft import TrainableDFlash
from spec_workers.draft_training.building import TargetTensors, layer_fields
from spec_workers.draft_training.draft import DraftVocabulary, TrainableDraft, TrainableEagle3
from spec_workers.draft_training.trainer import SENT_PREFIX
from spec_workers.features.feature_recorder import FeatureRecorder


def trainable_draft(engine: RolloutEngine) -> TrainableDraft:
    """A float32 copy of the engine's EAGLE-3 or block draft, on its device, with the target's
    embedding.

    Raises InvalidInputError for an engine without such a draft, for a draft with weights that the
    trainable network lacks, or for several ranks.
    """
    parallel = engine.config.parallel
    if parallel.mode is not ParallelMode.none:
        raise InvalidInputError(
            "parallel.mode", parallel.mode.value,
            "must be none: each rank would train its own draft. Train it separately with "
            "specrollout train-draft",
        )  # fmt: skip
    model = engine.worker.weights.parts.get("draft")
    if not isinstance(model, Eagle3 | DFlash):
        raise InvalidInputError(
            "engine", type(engine.worker).__name__, "must run an EAGLE-3 or block draft"
        )
    if model.reorders_head:
        raise InvalidInputError(
            "spec.draft_path", "d2t", "must ascend: write the draft's vocabulary in token order"
        )
    target = target_model(engine)
    token_ids_D = model.token_ids_D
    if token_ids_D is None:
        token_ids_D = torch.arange(target.spec.vocab_size)
    spec = model.spec
    arguments = (
        spec.decoder,
        layer_fields(spec.decoder),
        spec.features,
        DraftVocabulary(token_ids_D.cpu(), target.spec.vocab_size),
        target.embed,
    )
    draft: TrainableDraft = (
        TrainableDFlash(*arguments, block_size=spec.block_size, mask_token_id=spec.mask_token_id)
        if isinstance(model, DFlash)
        else TrainableEagle3(*arguments)
    )
    weights = checked_weights(draft, DraftSwap(engine).read())
    draft.load_state_dict(
        {name.removeprefix(SENT_PREFIX): weight for name, weight in weights.items()}
    )
    return draft.to(target.device)


def recorder_of(engine: RolloutEngine) -> FeatureRecorder:
    """The engine's feature recorder. Raises InvalidInputError if it records no features."""
    recorder = getattr(engine.worker, "recorder", None)
    if not isinstance(recorder, FeatureRecorder):
        raise InvalidInputError(
            "spec.feature_ring.num_bytes",
            0,
            "must be > 0: the draft is trained on recorded features",
        )
    return recorder


def target_model(engine: RolloutEngine) -> CausalLM:
    return engine.worker.target.model  # type: ignore[attr-defined]


def head_rows(engine: RolloutEngine, draft: TrainableDraft) -> torch.Tensor:
    """The target's current head at the draft's tokens, [D, E] in the target's dtype, for labels."""
    target = target_model(engine)
    return TargetTensors(target).head_rows(draft.vocabulary.token_ids_D).to(target.dtype)


def checked_weights(
    draft: TrainableDraft, tensors: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """``tensors``, if they are exactly the draft's weights; else raises InvalidInputError."""
    shapes = {SENT_PREFIX + name: tuple(each.shape) for name, each in draft.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != found:
        wrong = sorted(name for name, _ in shapes.items() ^ found.items())
        raise InvalidInputError(
            "draft", wrong[:8], "cannot be trained: the plain network of its kind has other weights"
        )
    return tensors


SELECTOR = "draft"


class SwapResult(enum.StrEnum):
    SWAPPED = "swapped"
    POSTPONED = "postponed"  # another update is open, or weights are released: try again later
    REFUSED = "refused"  # the engine refused the weights; the old draft serves


class DraftSwap:
    """Writes a draft's weights into an engine, and detects writes of others."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._version = self._version_now
        self.unavailable_reason = ""  # why the last swap failed; empty after SWAPPED

    @property
    def is_ours(self) -> bool:
        """Whether the engine's draft is the one from the start or from the last swap here."""
        return self._version == self._version_now

    def acknowledge(self) -> None:
        """Accept the engine's current draft as ours, after reading it."""
        self._version = self._version_now

    def swap(self, tensors: list[tuple[str, torch.Tensor]]) -> SwapResult:
        """Replace the whole draft or nothing: every tensor is checked before a byte is written.

        The target's weights, KV, prefix cache and running requests are left alone.
        """
        weights = self._engine.worker.weights
        try:
            weights.require_resident()
            if weights.is_under_way:
                raise WeightUpdateError("another weight update is under way")
            self._engine.update_weights_from_tensor(tensors, selector=SELECTOR, check_finite=True)
        except (EngineStateError, WeightUpdateError) as error:
            self.unavailable_reason = str(error)
            return SwapResult.POSTPONED
        except InvalidInputError as error:
            self.unavailable_reason = str(error)
            return SwapResult.REFUSED
        self._version, self.unavailable_reason = self._version_now, ""
        return SwapResult.SWAPPED

    def read(self) -> dict[str, torch.Tensor]:
        parts = self._engine.worker.weights.parts
        return {
            name: loader.read().cpu().clone()
            for name, loader in parts.weight_loaders(parts.selected(SELECTOR)).items()
        }

    @property
    def _version_now(self) -> int:
        parts = self._engine.worker.weights.parts.selected(SELECTOR)
        return sum(self._engine.weight_versions[part] for part in parts)
