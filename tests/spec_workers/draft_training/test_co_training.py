"""A draft that follows: nothing worse is swapped in, and nothing else notices."""

from __future__ import annotations

import copy
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.config import ParallelConfig
from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError
from spec_workers.draft_training.building import load_draft
from spec_workers.draft_training.candidate import Candidate, CandidateVerdict
from spec_workers.draft_training.co_training import CoTrainer
from spec_workers.draft_training.co_training_process import CoTrainingProcess
from spec_workers.draft_training.config import CoTrainingConfig, TrainingConfig
from spec_workers.draft_training.engine_draft import DraftSwap, SwapResult, trainable_draft
from spec_workers.draft_training.training_run import save_draft
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama

PROMPTS = [[7 * j + 1, 3 * j, 5] for j in range(8)]
OTHERS = [[90 - j, j, 3] for j in range(6)]
PARAMS = SamplingParams(max_new_tokens=24, temperature=0.7, seed=1, ignore_eos=True, n=2)
CONFIG = CoTrainingConfig(seconds=None, steps=15, batch_rows=150, held_out_every=3)
TRAINING = TrainingConfig(learning_rate=5e-3, warmup_steps=3, autocast=False)


@dataclass(frozen=True)
class Setting:
    engine: RolloutEngine  # rolled PROMPTS out, which its ring holds
    target: Path
    draft: Path
    first: dict[str, torch.Tensor]  # its weights
    rollouts: list[Rollout]
    accept_length: float  # of OTHERS


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    target = save_tiny_llama(tmp_path_factory.mktemp("target"))
    draft = save_tiny_eagle3(
        tmp_path_factory.mktemp("draft"), target, draft_vocab_size=80, intermediate_size=64
    )
    engine = drafting_engine(target, draft)
    rollouts, first = engine.generate(PROMPTS, PARAMS), DraftSwap(engine).read()
    recorder, engine.worker.recorder = engine.worker.recorder, None
    length = accept_length(engine)
    engine.worker.recorder = recorder
    return Setting(engine, target, draft, first, rollouts, length)


@pytest.fixture
def engine(setting) -> Iterator[RolloutEngine]:
    engine = setting.engine
    if engine.weight_version:
        engine.update_weights_from_disk(setting.target, selector="target")
        engine.update_weights_from_disk(setting.target, selector="target", weight_version=0)
    engine.update_weights_from_tensor(setting.first, selector="draft", weight_version=0)
    yield engine
    engine.check_integrity()


def drafting_engine(target: Path, draft: Path, **options) -> RolloutEngine:
    options = {"budget": "fixed", "feature_ring": {"num_bytes": 4 << 20}} | options
    options |= {"draft_path": str(draft), "num_steps": 3, "num_draft_tokens": 6}
    return RolloutEngine.from_pretrained(target, spec="eagle", spec_options=options)


def accept_length(engine: RolloutEngine) -> float:
    """The accept length on other prompts than those that are trained on."""
    engine.reset_metrics()
    engine.generate(OTHERS, PARAMS)
    return engine.metrics().accept_length


def wait_for_round(process: CoTrainingProcess):
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        done = process.poll()
        if done is not None and done.judgement.verdict is not CandidateVerdict.NOT_JUDGED:
            return done
        assert not process.unavailable_reason, process.unavailable_reason
        time.sleep(0.02)
    raise TimeoutError


# In the engine's process


def test_the_draft_gets_better_and_the_rollouts_stay_the_same(engine, setting):
    co_trainer = CoTrainer(engine, CONFIG, training=TRAINING)
    done = co_trainer.run()
    assert done.judgement.verdict is CandidateVerdict.AS_GOOD
    assert done.swap is SwapResult.SWAPPED
    assert done.judgement.accept_length > done.judgement.accept_length_in_use
    assert engine.weight_versions == {"target": 0, "draft": 1}
    rollouts = engine.generate(PROMPTS, PARAMS)
    assert [each.token_ids for each in rollouts] == [each.token_ids for each in setting.rollouts]
    assert [each.logprobs for each in rollouts] == [each.logprobs for each in setting.rollouts]
    assert accept_length(engine) > setting.accept_length + 0.02
    counters = co_trainer.counters()
    assert (counters["swaps"], counters["sequences"]) == (1, len(rollouts))
    assert counters["held_out_accept_length"] > counters["held_out_accept_length_in_use"]


def test_requests_that_run_are_not_disturbed(engine):
    co_trainer = CoTrainer(engine, CONFIG, training=TRAINING)
    request = engine.submit([1, 2, 3, 4, 5], PARAMS)
    for _ in range(6):
        engine.step()
    computed, usage = request.computed_len, engine.worker.memory.usage
    assert co_trainer.run().swap is SwapResult.SWAPPED
    assert (request.computed_len, engine.worker.memory.usage) == (computed, usage)
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
    assert set(ended[0].weight_versions) == {0}
    tokens, logprobs = ended[0].token_ids, ended[0].logprobs
    assert engine.score([1, 2, 3, 4, 5], tokens, PARAMS) == logprobs
    assert tokens == engine.generate([[1, 2, 3, 4, 5]], PARAMS)[0].token_ids


def test_rows_are_trained_on_so_often_and_no_more(engine):
    config = CoTrainingConfig(seconds=None, steps=100, batch_rows=150, max_replay=1)
    co_trainer = CoTrainer(engine, config, training=TRAINING)
    assert 1 <= co_trainer.run().steps < 20
    done = co_trainer.run()
    assert done.steps == 0
    assert done.judgement.verdict is CandidateVerdict.NOT_JUDGED


def test_a_draft_that_is_worse_is_not_swapped_in(engine):
    digest = engine.weights_digest("draft")
    config = CoTrainingConfig(seconds=None, steps=1, held_out_every=3, min_gain=50.0)
    co_trainer = CoTrainer(engine, config, training=TRAINING)
    for refused in range(1, 4):
        done = co_trainer.run()
        assert done.judgement.verdict is CandidateVerdict.WORSE
        assert done.swap is None
        assert co_trainer.counters()["worse"] == refused
    assert engine.weights_digest("draft") == digest
    assert engine.weight_versions["draft"] == 0


def test_nan_never_reaches_the_engine(engine):
    digest = engine.weights_digest("draft")
    co_trainer = CoTrainer(engine, CONFIG, training=TRAINING)
    draft = co_trainer.candidate.trainer.draft
    with torch.no_grad():
        draft.fc.weight[0, 0] = torch.nan
    assert co_trainer.run().judgement.verdict is CandidateVerdict.NOT_FINITE
    assert engine.weights_digest("draft") == digest
    assert co_trainer.counters()["broken"] == 1
    assert co_trainer.run().swap is SwapResult.SWAPPED  # it began anew from the draft in use


def test_the_engine_refuses_nan_by_itself(engine):
    co_trainer = CoTrainer(engine, CONFIG, training=TRAINING)
    digest = engine.weights_digest("draft")
    tensors = co_trainer.swap.read()
    tensors["draft.norm.weight"][3] = torch.inf
    assert co_trainer.swap.swap(list(tensors.items())) is SwapResult.REFUSED
    assert "infinite" in co_trainer.swap.unavailable_reason
    assert engine.can_run
    assert engine.weights_digest("draft") == digest


def test_a_swap_waits_while_another_update_is_open(engine):
    tensors = load_file(Path(engine.config.model.path) / "model.safetensors")
    co_trainer = CoTrainer(engine, CONFIG, training=TRAINING)
    digest = engine.weights_digest("draft")
    engine.begin_weight_update()
    done = co_trainer.run()
    assert done.swap is SwapResult.POSTPONED
    assert "under way" in done.unavailable_reason
    assert engine.weights_digest("draft") == digest
    engine.update_weights_from_tensor(tensors)  # goes on as if nothing had been
    engine.end_weight_update()
    assert engine.weight_versions == {"target": 1, "draft": 0}
    assert co_trainer.run().swap is SwapResult.SWAPPED
    assert engine.weight_versions == {"target": 1, "draft": 1}


def test_asleep_nothing_is_trained(engine):
    co_trainer = CoTrainer(engine, CONFIG, training=TRAINING)
    engine.release_memory()
    with pytest.raises(EngineStateError, match="released"):
        co_trainer.run()
    engine.resume_memory()
    assert co_trainer.run().swap is SwapResult.SWAPPED


def test_labels_come_from_the_targets_head_as_it_is(engine, tmp_path):
    co_trainer = CoTrainer(engine, CONFIG, training=TRAINING)
    head_DE = co_trainer.candidate.trainer._head_DE.clone()
    engine.update_weights_from_disk(save_tiny_llama(tmp_path, seed=5), selector="target")
    co_trainer.run()
    assert not torch.equal(co_trainer.candidate.trainer._head_DE, head_DE)
    assert co_trainer.counters()["staleness"] == 1


def test_somebody_elses_draft_is_the_one_to_begin_from(engine):
    co_trainer = CoTrainer(engine, CONFIG, training=TRAINING)
    other = {name: tensor + 0.01 for name, tensor in co_trainer.swap.read().items()}
    engine.update_weights_from_tensor(other, selector="draft")
    co_trainer._follow_engine()
    for name, tensor in co_trainer.candidate.trainer.named_tensors():
        torch.testing.assert_close(tensor, other[name])


def test_in_another_process_it_is_the_same_network(engine, tmp_path):
    """The draft's own rotary base and norms, which are not the target's."""
    draft = trainable_draft(engine)
    save_draft(draft, tmp_path, torch.float32)
    there = load_draft(tmp_path, draft.embed)
    features = torch.randn(6, draft.fc.in_features, generator=torch.Generator().manual_seed(0))
    tokens, positions = torch.arange(6), torch.arange(40, 46)
    with torch.inference_mode():
        ours, theirs = (each.read(tokens, features, positions)[0] for each in (draft, there))
    assert torch.equal(ours, theirs)


def test_what_cannot_be_trained_is_refused(setting, tmp_path):
    unrecorded = drafting_engine(setting.target, setting.draft, feature_ring=None)
    with pytest.raises(InvalidInputError, match="feature_ring"):
        CoTrainer(unrecorded, CONFIG)
    with pytest.raises(InvalidInputError, match=r"engine='\w*Worker': must run an EAGLE-3 draft"):
        CoTrainer(RolloutEngine.from_pretrained(setting.target, spec="none"), CONFIG)
    normed = save_tiny_eagle3(tmp_path, setting.target, options={"norm_before_fc": True})
    with pytest.raises(InvalidInputError, match="other weights"):
        CoTrainer(drafting_engine(setting.target, normed), CONFIG)
    of_ranks = copy.copy(setting.engine)
    of_ranks.config = replace(of_ranks.config, parallel=ParallelConfig(mode="tensor", size=2))
    for co_training in (CoTrainer, CoTrainingProcess):
        with pytest.raises(
            InvalidInputError, match=r"parallel\.mode='tensor': must be none.*separately"
        ):
            co_training(of_ranks, CONFIG)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (CoTrainingConfig, "steps", 2.5),
        (CoTrainingConfig, "batch_rows", 1.5),
        (CoTrainingConfig, "max_replay", 0),
        (CoTrainingConfig, "max_replay", math.inf),
        (CoTrainingConfig, "seconds", math.inf),
        (CoTrainingConfig, "min_gain", math.nan),
        *((TrainingConfig, "learning_rate", rate) for rate in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_wrong_settings_are_named(kind, name, value):
    with pytest.raises(InvalidInputError, match=name):
        kind(**{name: value})


# The judgement, by itself


@dataclass
class Result:
    accept_length: float


class ScriptedTrainer:
    """Its weight is a number, each step adds one; how long it is accepted is looked up."""

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


def test_each_is_judged_against_the_one_in_use(candidate_of):
    candidate = candidate_of({0: 2.0, 1: 2.5, 2: 2.25})
    assert candidate.judge().verdict is CandidateVerdict.NOT_JUDGED
    candidate.train()
    judgement = candidate.judge()
    assert (judgement.accept_length, judgement.accept_length_in_use) == (2.5, 2.0)
    assert candidate.judge() == judgement  # judging changes nothing
    candidate.swapped()
    candidate.train()
    assert candidate.judge().accept_length_in_use == 2.5
    assert candidate.judge().verdict is CandidateVerdict.WORSE


def test_one_that_is_as_good_has_seen_more(candidate_of):
    candidate = candidate_of({0: 2.0, 1: 2.0})
    candidate.train()
    assert candidate.judge().verdict is CandidateVerdict.AS_GOOD


def test_after_refusals_training_begins_anew_from_the_draft_in_use(candidate_of):
    candidate = candidate_of({0: 2.0, 1: 1.0, 2: 0.5, 3: 3.0})
    candidate.train()
    assert candidate.judge().verdict is CandidateVerdict.WORSE
    candidate.refused()
    assert candidate.trainer.weight == 1  # it may be on its way
    candidate.train()
    assert candidate.judge().verdict is CandidateVerdict.WORSE
    candidate.refused()
    assert candidate.trainer.weight == 0


def test_a_draft_is_never_judged_twice_without_training_between(candidate_of):
    candidate = candidate_of({0: 2.0, 1: 1.0})
    candidate.train()
    candidate.refused()
    assert candidate.judge().verdict is CandidateVerdict.NOT_JUDGED


# In a process of its own


def test_another_process_trains_and_may_die(engine, setting, tmp_path, caplog):
    with CoTrainingProcess(engine, CONFIG, training=TRAINING, niceness=0) as process:
        assert wait_for_round(process).swap is SwapResult.SWAPPED
        assert engine.weight_versions == {"target": 0, "draft": 1}
        assert accept_length(engine) > setting.accept_length + 0.02

        # The policy moves: the target's embedding and head go over, and training goes on.
        engine.update_weights_from_disk(save_tiny_llama(tmp_path, seed=5), selector="target")
        engine.generate(PROMPTS, PARAMS)
        while (done := wait_for_round(process)).newest_version < 1:
            pass
        assert done.sequences
        swaps, version = process.tally.swaps, engine.weight_versions["draft"]
        assert version == swaps

        digest = engine.weights_digest("draft")
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait()
        while not process.unavailable_reason:
            process.poll()
        assert "exit status -9" in process.unavailable_reason
        assert process.counters()["is_training"] == 0
        assert process.poll() is None
        assert engine.weights_digest("draft") == digest
        assert engine.generate(PROMPTS, PARAMS)[0].token_ids

        process.restart()
        assert not process.unavailable_reason
        wait_for_round(process)

        process._unread += b"a library's greeting\n" + b"17\n\xff\n" + b"{}\n"
        wait_for_round(process)
        assert not process.unavailable_reason
        logged = [record.message for record in caplog.records]
        assert sum("wrote: " in message for message in logged) == 4
    assert process.poll() is None
    assert engine.can_run


def test_a_process_that_dies_over_a_swap_leaves_the_old_draft(engine):
    """It is killed when its weights are announced and not yet taken; its memory is removed."""
    digest = engine.weights_digest("draft")
    with CoTrainingProcess(engine, CONFIG, training=TRAINING, niceness=0) as process:
        process.poll()
        answers, deadline = [], time.monotonic() + HANG_SECONDS
        while not any(each.get("weights") for each in answers):
            assert time.monotonic() < deadline
            answers += process._answers()
            process._awaited = 0
            if answers and not any("judgement" in each for each in answers):
                process._start_round()
                answers.clear()
            time.sleep(0.02)
        process._process.kill()
        process._process.wait()
        (announced,) = [each for each in answers if each.get("weights")]
        Path("/dev/shm", announced["weights"]["segment"]).unlink(missing_ok=True)
        process._answers = lambda: [announced]
        process._awaited = 1
        assert process.poll() is None
        assert process.unavailable_reason
    assert engine.can_run
    assert engine.weights_digest("draft") == digest


def test_an_open_update_is_not_touched_by_a_swap_that_fails(engine):
    """Begun in between, as by another thread of the same loop."""
    co_trainer = CoTrainer(engine, CONFIG, training=TRAINING)
    tensors = list(co_trainer.swap.read().items())
    engine.begin_weight_update(selector="draft")
    engine.update_weights_from_tensor(tensors[:1])
    assert co_trainer.swap.swap(tensors) is SwapResult.POSTPONED
    assert engine.worker.weights.is_under_way
    engine.update_weights_from_tensor(tensors[1:])
    engine.end_weight_update()
    assert engine.can_run
    assert not co_trainer.swap.is_ours
    with pytest.raises(WeightUpdateError):
        engine.end_weight_update()
