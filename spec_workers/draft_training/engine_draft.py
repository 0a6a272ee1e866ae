"""The draft an engine runs, as one that can be trained, and what that needs of the target.

Legend: D draft vocabulary, V the target's vocabulary, E hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollout.config import ParallelMode
from rollout.engine.engine import RolloutEngine
from rollout.errors import InvalidInputError
from rollout.models.causal_lm import CausalLM
from rollout.models.draft_model import DraftFamily
from rollout.models.eagle.eagle3 import Eagle3 as Eagle3Model
from spec_workers.draft_training.building import layer_fields
from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.draft_swap import DraftSwap
from spec_workers.draft_training.eagle3 import Eagle3
from spec_workers.draft_training.target_tensors import DraftVocabulary, TargetTensors
from spec_workers.draft_training.trainer import SENT_PREFIX
from spec_workers.features.feature_recorder import FeatureRecorder


def trainable_draft(engine: RolloutEngine) -> TrainableDraft:
    """A float32 copy of the engine's EAGLE-3 draft, on its device; its embedding is the target's.

    Raises InvalidInputError for an engine without one, with one that has weights which the network
    that is trained does not have, or of several ranks.
    """
    parallel = engine.config.parallel
    if parallel.mode is not ParallelMode.none:
        raise InvalidInputError(
            "parallel.mode", parallel.mode.value,
            "must be none where a draft is trained beside the engine, as each rank would train one "
            "of its own: train it apart, with specrollout train-draft",
        )  # fmt: skip
    model = engine.worker.weights.parts.get("draft")
    if not isinstance(model, Eagle3Model) or model.spec.family is not DraftFamily.EAGLE3:
        raise InvalidInputError("engine", type(engine.worker).__name__, "must run an EAGLE-3 draft")
    if model.reorders_head:
        raise InvalidInputError(
            "spec.draft_path", "d2t", "must ascend: write the draft's vocabulary in token order"
        )
    target = target_model(engine)
    token_ids_D = model.token_ids_D
    if token_ids_D is None:
        token_ids_D = torch.arange(target.spec.vocab_size)
    draft = Eagle3(
        model.spec.decoder,
        layer_fields(model.spec.decoder),
        model.spec.features,
        DraftVocabulary(token_ids_D.cpu(), target.spec.vocab_size),
        target.embed,
    )
    weights = checked_weights(draft, DraftSwap(engine).read())
    draft.load_state_dict({name.removeprefix(SENT_PREFIX): it for name, it in weights.items()})
    return draft.to(target.device)


def recorder_of(engine: RolloutEngine) -> FeatureRecorder:
    """Raises InvalidInputError for an engine that records no features."""
    recorder = getattr(engine.worker, "recorder", None)
    if not isinstance(recorder, FeatureRecorder):
        raise InvalidInputError(
            "spec.feature_ring.num_bytes", 0, "must be > 0: the draft is trained on what it keeps"
        )
    return recorder


def target_model(engine: RolloutEngine) -> CausalLM:
    """The target model of the engine's worker."""
    return engine.worker.target.model  # type: ignore[attr-defined]


def target_embedding(engine: RolloutEngine) -> torch.Tensor:
    """The target's embedding as it is now, [V, E]."""
    target = target_model(engine)
    return target.embed(torch.arange(target.spec.vocab_size, device=target.device))


def head_rows(engine: RolloutEngine, draft: TrainableDraft) -> torch.Tensor:
    """The target's head as it is now, [D, E] in the target's dtype: what labels come from."""
    target = target_model(engine)
    return TargetTensors(target).head_rows(draft.vocabulary.token_ids_D).to(target.dtype)


def checked_weights(
    draft: TrainableDraft, tensors: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Raises InvalidInputError unless they are all of the draft's weights and no others."""
    shapes = {SENT_PREFIX + name: tuple(each.shape) for name, each in draft.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != found:
        wrong = sorted(name for name, _ in shapes.items() ^ found.items())
        raise InvalidInputError(
            "draft", wrong[:8], "cannot be trained: the plain EAGLE-3 network has other weights"
        )
    return tensors
