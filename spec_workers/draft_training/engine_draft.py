"""The draft an engine runs, as one that can be trained.

Legend: V the target's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from rollout.engine import RolloutEngine
from rollout.errors import InvalidInputError
from rollout.models.causal_lm import CausalLM
from rollout.models.draft_model import DraftFamily
from rollout.models.eagle.eagle3 import Eagle3 as Eagle3Model
from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.draft_swap import DraftSwap
from spec_workers.draft_training.eagle3 import Eagle3
from spec_workers.draft_training.trainer import SENT_PREFIX
from spec_workers.draft_training.vocabulary import DraftVocabulary
from spec_workers.feature_recorder import FeatureRecorder


def trainable_draft(engine: RolloutEngine) -> TrainableDraft:
    """A float32 copy of the engine's EAGLE-3 draft, on the CPU; its embedding is the target's.

    Raises InvalidInputError for an engine without one, or with one that has weights which the
    network that is trained does not have.
    """
    model = engine.worker.weights.parts.get("draft")
    if not isinstance(model, Eagle3Model) or model.spec.family is not DraftFamily.EAGLE3:
        raise InvalidInputError("engine", engine.weight_versions, "must run an EAGLE-3 draft")
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
        json.loads((Path(engine.config.model.path) / "config.json").read_text()),
        model.spec.features,
        DraftVocabulary(token_ids_D.cpu(), target.spec.vocab_size),
        target.embed,
    )
    write_draft(draft, DraftSwap(engine).read())
    return draft


def recorder_of(engine: RolloutEngine) -> FeatureRecorder:
    """Raises InvalidInputError for an engine that records no features."""
    recorder = getattr(engine.worker, "recorder", None)
    if not isinstance(recorder, FeatureRecorder):
        raise InvalidInputError(
            "spec.feature_ring.num_bytes", 0, "must be > 0: the draft is trained on what it keeps"
        )
    return recorder


def target_model(engine: RolloutEngine) -> CausalLM:
    """What every worker verifies with."""
    return engine.worker.target.model  # type: ignore[attr-defined]


@torch.no_grad()
def write_draft(draft: TrainableDraft, tensors: Mapping[str, torch.Tensor]) -> None:
    """Weights as `DraftTrainer.named_tensors` names them. Raises InvalidInputError unless they are
    all of the draft's and no others."""
    parameters = {SENT_PREFIX + name: each for name, each in draft.named_parameters()}
    wrong = sorted(parameters.keys() ^ tensors.keys())
    wrong += [
        n for n, each in parameters.items() if n in tensors and each.shape != tensors[n].shape
    ]
    if wrong:
        raise InvalidInputError(
            "draft", wrong[:8], "cannot be trained: the plain EAGLE-3 network has other weights"
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
