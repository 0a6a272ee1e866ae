"""Drafts to train for tiny targets, and engines whose drafts are trained."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout import RolloutEngine, SamplingParams
from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.draft_training.building import TargetTensors, new_draft
from spec_workers.draft_training.config import CoTrainingConfig, TrainingConfig
from spec_workers.draft_training.draft import DraftVocabulary
from spec_workers.draft_training.sequences import TrainingSequence
from spec_workers.draft_training.target_features import TargetFeatures
from spec_workers.draft_training.trainer import DraftTrainer

VOCAB, DRAFT_VOCAB = 11, 9
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)

PROMPTS = [[7 * j + 1, 3 * j, 5] for j in range(8)]
OTHERS = [[90 - j, j, 3] for j in range(6)]
PARAMS = SamplingParams(max_new_tokens=24, temperature=0.7, seed=1, ignore_eos=True, n=2)
CONFIG = CoTrainingConfig(seconds=None, steps=15, batch_rows=150, held_out_every=3)
TRAINING = TrainingConfig(learning_rate=5e-3, warmup_steps=3, autocast=False)


def make_draft(target, rollouts, kind="eagle3"):
    vocabulary = DraftVocabulary.most_frequent(rollouts, DRAFT_VOCAB, VOCAB)
    draft = new_draft(target, vocabulary, 0, kind)
    with torch.no_grad():  # so that norms are told apart
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(0))
    return draft


def make_trainer(target, rollouts, kind="eagle3", **settings) -> DraftTrainer:
    draft = make_draft(target, rollouts, kind)
    head = TargetTensors(target).head_rows(draft.vocabulary.token_ids_D)
    return DraftTrainer(draft, head, TrainingConfig(autocast=False, warmup_steps=2, **settings))


def computed(target, features: AuxHiddenStates, rollouts) -> list[TrainingSequence]:
    return TargetFeatures(target, features, rollouts, 0).take(range(len(rollouts)))


def drafting_engine(target: Path, draft: Path, **options) -> RolloutEngine:
    """An engine that runs the draft and records features for its training."""
    options = {"budget": "fixed", "feature_ring": {"num_bytes": 4 << 20}} | options
    options |= {"draft_path": str(draft), "num_steps": 3, "num_draft_tokens": 6}
    return RolloutEngine.from_pretrained(target, spec="eagle", spec_options=options)


def accept_length(engine: RolloutEngine) -> float:
    """The accept length on other prompts than those that are trained on."""
    engine.reset_metrics()
    engine.generate(OTHERS, PARAMS)
    return engine.metrics().accept_length
