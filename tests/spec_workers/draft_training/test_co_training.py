"""A draft that follows the policy: none that is worse is swapped in, and rollouts do not change."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout import RolloutEngine
from rollout.config import ParallelConfig
from rollout.errors import EngineStateError, InvalidInputError
from spec_workers.draft_training.building import load_draft
from spec_workers.draft_training.candidate import Candidate, CandidateVerdict
from spec_workers.draft_training.co_training import CoTrainer
from spec_workers.draft_training.config import CoTrainingConfig, TrainingConfig
from spec_workers.draft_training.engine_draft import SwapResult, trainable_draft
from spec_workers.draft_training.training_run import save_draft
from tests.helpers.draft_training import (
    CONFIG,
    PARAMS,
    PROMPTS,
    TRAINING,
    accept_length,
    drafting_engine,
)
from tests.helpers.tiny_draft import save_tiny_dflash, save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama


@pytest.fixture
def co_trainer(engine) -> CoTrainer:
    return CoTrainer(engine, CONFIG, training=TRAINING)


def test_a_block_draft_gets_better_and_rollouts_stay_the_same(setting, tmp_path):
    draft = save_tiny_dflash(tmp_path, setting.target, draft_vocab_size=96, layers=(1, 2))
    table = load_file(draft / "model.safetensors")
    table["d2t"] = torch.zeros(96, dtype=torch.int64)  # a head whose rows ascend
    table["t2d"] = torch.arange(len(table["t2d"])) < 96
    save_file(table, draft / "model.safetensors", metadata={"format": "pt"})
    engine = drafting_engine(setting.target, draft)
    rollouts = engine.generate(PROMPTS, PARAMS)
    assert [each.token_ids for each in rollouts] == [each.token_ids for each in setting.rollouts]
    done = CoTrainer(engine, CONFIG, training=TRAINING).run()
    assert done.swap is SwapResult.SWAPPED
    assert done.judgement.accept_length > done.judgement.accept_length_in_use
    rollouts = engine.generate(PROMPTS, PARAMS)
    assert [each.logprobs for each in rollouts] == [each.logprobs for each in setting.rollouts]
    engine.check_integrity()


def test_the_draft_gets_better_and_rollouts_stay_the_same(co_trainer, engine, setting):
    request = engine.submit([1, 2, 3, 4, 5], PARAMS)
    for _ in range(6):
        engine.step()
    computed, usage = request.computed_len, engine.worker.memory.usage
    done = co_trainer.run()
    assert (request.computed_len, engine.worker.memory.usage) == (computed, usage)
    assert done.judgement.verdict is CandidateVerdict.AS_GOOD
    assert done.swap is SwapResult.SWAPPED
    assert done.judgement.accept_length > done.judgement.accept_length_in_use
    assert engine.weight_versions == {"target": 0, "draft": 1}
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
    assert set(ended[0].weight_versions) == {0}
    assert engine.score([1, 2, 3, 4, 5], ended[0].token_ids, PARAMS) == ended[0].logprobs
    rollouts = engine.generate(PROMPTS, PARAMS)
    assert [each.token_ids for each in rollouts] == [each.token_ids for each in setting.rollouts]
    assert [each.logprobs for each in rollouts] == [each.logprobs for each in setting.rollouts]
    assert accept_length(engine) > setting.accept_length + 0.02
    counters = co_trainer.counters()
    assert (counters["swaps"], counters["sequences"]) == (1, len(rollouts))
    assert counters["held_out_accept_length"] > counters["held_out_accept_length_in_use"]


def test_rows_are_trained_on_so_often_and_no_more(engine):
    config = CoTrainingConfig(seconds=None, steps=100, batch_rows=150, max_replay=1)
    co_trainer = CoTrainer(engine, config, training=TRAINING)
    assert 1 <= co_trainer.run().steps < 20
    done = co_trainer.run()
    assert done.steps == 0
    assert done.judgement.verdict is CandidateVerdict.NOT_JUDGED


def test_a_worse_draft_is_not_swapped_in(engine):
    digest = engine.weights_digest("draft")
    config = CoTrainingConfig(seconds=None, steps=1, held_out_every=3, min_gain=50.0)
    co_trainer = CoTrainer(engine, config, training=TRAINING)
    done = co_trainer.run()
    assert done.judgement.verdict is CandidateVerdict.WORSE
    assert done.swap is None
    assert co_trainer.counters()["worse"] == 1
    assert engine.weights_digest("draft") == digest


def test_nan_never_reaches_the_engine(co_trainer, engine):
    digest = engine.weights_digest("draft")
    with torch.no_grad():
        co_trainer.candidate.trainer.draft.fc.weight[0, 0] = torch.nan
    assert co_trainer.run().judgement.verdict is CandidateVerdict.NOT_FINITE
    assert co_trainer.counters()["broken"] == 1
    tensors = co_trainer.swap.read()
    tensors["draft.norm.weight"][3] = torch.inf
    assert co_trainer.swap.swap(list(tensors.items())) is SwapResult.REFUSED
    assert "infinite" in co_trainer.swap.unavailable_reason
    assert engine.weights_digest("draft") == digest
    assert co_trainer.run().swap is SwapResult.SWAPPED  # it began anew from the draft in use


@pytest.mark.parametrize("selector", ["all", "draft"])
def test_a_swap_waits_while_another_update_is_open(co_trainer, engine, selector):
    tensors = load_file(Path(engine.config.model.path) / "model.safetensors")
    if selector == "draft":
        tensors = co_trainer.swap.read()
    digest = engine.weights_digest("draft")
    engine.begin_weight_update(selector=selector)
    done = co_trainer.run()
    assert done.swap is SwapResult.POSTPONED
    assert "under way" in done.unavailable_reason
    assert engine.weights_digest("draft") == digest
    engine.update_weights_from_tensor(tensors)  # the open update goes on
    engine.end_weight_update()
    versions = engine.weight_versions
    assert sum(versions.values()) == 1
    assert co_trainer.swap.is_ours == (selector == "all")
    assert co_trainer.run().swap is SwapResult.SWAPPED
    assert engine.weight_versions == versions | {"draft": versions["draft"] + 1}
    assert co_trainer.counters()["postponed"] == 1


def test_nothing_is_trained_while_weights_are_released(co_trainer, engine):
    engine.release_memory()
    with pytest.raises(EngineStateError, match="released"):
        co_trainer.run()
    engine.resume_memory()
    assert co_trainer.run().swap is SwapResult.SWAPPED


def test_training_follows_the_targets_head_and_a_draft_that_others_swap_in(engine, tmp_path):
    tiny_steps = replace(TRAINING, learning_rate=1e-9)
    co_trainer = CoTrainer(engine, CONFIG, training=tiny_steps)
    head_DE = co_trainer.candidate.trainer._head_DE.clone()
    other = {name: tensor + 0.01 for name, tensor in co_trainer.swap.read().items()}
    engine.update_weights_from_disk(save_tiny_llama(tmp_path, seed=5), selector="target")
    engine.update_weights_from_tensor(other, selector="draft")
    co_trainer.run()
    assert not torch.equal(co_trainer.candidate.trainer._head_DE, head_DE)
    assert co_trainer.counters()["staleness"] == 1
    for name, tensor in co_trainer.candidate.trainer.named_tensors():
        torch.testing.assert_close(tensor, other[name], atol=1e-5, rtol=1e-5)


def test_the_engines_draft_is_loaded_as_the_same_network(engine, tmp_path):
    """With the draft's own rotary base and norms, which are not the target's."""
    draft = trainable_draft(engine)
    save_draft(draft, tmp_path, torch.float32)
    there = load_draft(tmp_path, draft.embed)
    features = torch.randn(6, draft.fc.in_features, generator=torch.Generator().manual_seed(0))
    tokens, positions = torch.arange(6), torch.arange(40, 46)
    with torch.inference_mode():
        ours, theirs = (each.read(tokens, features, positions)[0] for each in (draft, there))
    assert torch.equal(ours, theirs)


def test_engines_and_settings_that_cannot_be_are_refused(setting, tmp_path):
    unrecorded = drafting_engine(setting.target, setting.draft, feature_ring=None)
    with pytest.raises(InvalidInputError, match="feature_ring"):
        CoTrainer(unrecorded, CONFIG)
    with pytest.raises(
        InvalidInputError, match=r"engine='\w*Worker': must run an EAGLE-3 or block draft"
    ):
        CoTrainer(RolloutEngine.from_pretrained(setting.target, spec="none"), CONFIG)
    normed = save_tiny_eagle3(tmp_path, setting.target, options={"norm_before_fc": True})
    with pytest.raises(InvalidInputError, match="other weights"):
        CoTrainer(drafting_engine(setting.target, normed), CONFIG)
    of_ranks = copy.copy(setting.engine)
    of_ranks.config = replace(of_ranks.config, parallel=ParallelConfig(mode="tensor", size=2))
    with pytest.raises(InvalidInputError, match=r"parallel\.mode='tensor': must be none"):
        CoTrainer(of_ranks, CONFIG)
    for kind, name, value in (
        (CoTrainingConfig, "steps", 2.5),
        (CoTrainingConfig, "max_replay", 0),
        (CoTrainingConfig, "seconds", math.inf),
        (CoTrainingConfig, "min_gain", math.nan),
        (TrainingConfig, "learning_rate", 0.0),
        (TrainingConfig, "learning_rate", math.inf),
    ):
        with pytest.raises(InvalidInputError, match=name):
            kind(**{name: value})


# The judgement, by itself


@dataclass
class Result:
    accept_length: float


class ScriptedTrainer:
    """Its weight is a number, each step adds one; its accept length is looked up."""

    def __init__(self, features, accept_lengths: dict[int, float]) -> None:
        self.features, self.accept_lengths, self.weight = features, accept_lengths, 0

    def step(self, batch) -> None:
        self.weight += 1

    def held_out_accept_length(self, sequences) -> Result:
        return Result(self.accept_lengths[self.weight])

    def named_tensors(self):
        yield "draft.weight", torch.tensor([float(self.weight)])

    def state_dict(self):
        return {"weight": self.weight}

    def load_state_dict(self, state) -> None:
        self.weight = state["weight"]


@pytest.fixture
def candidate_of(engine):
    def make(accept_lengths: dict[int, float]) -> Candidate:
        rollouts = CoTrainer(engine, CONFIG).candidate.rollouts
        trainer = ScriptedTrainer(rollouts.features, accept_lengths)
        config = CoTrainingConfig(seconds=None, steps=1, held_out_every=3, max_refusals=2)
        return Candidate(trainer, rollouts, config, torch.float32)

    return make


def test_candidates_are_judged_against_the_draft_in_use(candidate_of):
    candidate = candidate_of({0: 2.0, 1: 2.0, 2: 2.5, 3: 2.25})
    assert candidate.judge().verdict is CandidateVerdict.NOT_JUDGED
    candidate.train()
    assert candidate.judge().verdict is CandidateVerdict.AS_GOOD, "it has seen more"
    candidate.train()
    judgement = candidate.judge()
    assert (judgement.accept_length, judgement.accept_length_in_use) == (2.5, 2.0)
    assert candidate.judge() == judgement, "judging changes nothing"
    candidate.swapped()
    candidate.train()
    assert candidate.judge().accept_length_in_use == 2.5
    assert candidate.judge().verdict is CandidateVerdict.WORSE


def test_after_refusals_training_begins_anew_from_the_draft_in_use(candidate_of):
    candidate = candidate_of({0: 2.0, 1: 1.0, 2: 0.5})
    for weight in (1, 0):  # after the first refusal training goes on
        candidate.train()
        assert candidate.judge().verdict is CandidateVerdict.WORSE
        candidate.refused()
        assert candidate.trainer.weight == weight
        assert candidate.judge().verdict is CandidateVerdict.NOT_JUDGED
