"""The engine's calls on a real, tiny model."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from rollout import FinishReason, RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError, OutOfMemoryError
from tests.helpers.compared import outcome

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 12]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=24, seed=3, n=2, ignore_eos=True)


@pytest.fixture
def engine(tiny_model_path):
    return RolloutEngine.from_pretrained(tiny_model_path, max_running=4)


def random_weights(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    weight_loaders = engine.worker.target.model.weight_loaders()
    return [
        (name, torch.randn(d.shape, generator=generator) * 0.2)
        for name, d in weight_loaders.items()
    ]


def run_out(engine):
    rollouts = []
    while engine.has_unfinished:
        rollouts += engine.step()
    return rollouts


def test_generate_is_in_prompt_order_and_seeds_repeat(engine):
    rollouts = engine.generate(PROMPTS, PARAMS)
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [
        (p, s) for p in range(3) for s in range(2)
    ]
    assert [r.prompt_ids for r in rollouts[::2]] == PROMPTS
    assert all(r.finish_reason is FinishReason.LENGTH for r in rollouts)
    assert all(len(r.logprobs) == len(r.weight_versions) == 24 for r in rollouts)
    assert rollouts[0].token_ids != rollouts[1].token_ids
    assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(rollouts)
    assert outcome(engine.generate(PROMPTS, replace(PARAMS, seed=4))) != outcome(rollouts)
    whole = next(rollout for rollout in rollouts if rollout.seed < 0)
    for same_bits in (whole.seed, whole.seed % 2**64):
        engine.submit(whole.prompt_ids, PARAMS, request_seed=same_bits)
        (again,) = run_out(engine)
        assert (again.seed, again.token_ids) == (whole.seed, whole.token_ids)


def test_a_stream_yields_as_they_finish_and_may_be_left_early(engine):
    lengths = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (30, 3, 12)]
    assert [len(r.token_ids) for r in engine.stream(PROMPTS, lengths)] == [3, 12, 30]
    for _ in engine.stream(PROMPTS, PARAMS):
        break
    assert not engine.has_unfinished
    assert engine.worker.memory.usage.used == 0


def test_a_refused_update_leaves_running_requests_alone(engine):
    engine.submit(PROMPTS[0], PARAMS)
    for _ in range(3):
        engine.step()
    used, misspelt = engine.worker.memory.usage.used, [("misspelt", torch.zeros(1))]
    with pytest.raises(InvalidInputError, match="misspelt"):
        engine.update_weights_from_tensor(misspelt, abort_all_requests=True)
    with pytest.raises(InvalidInputError, match="weight_version"):
        engine.update_weights_from_tensor(random_weights(engine, 1), weight_version=0)
    assert engine.worker.memory.usage.used == used
    assert engine.scheduler.num_running == 1


def test_an_update_may_keep_the_kv_of_running_requests_but_no_cached_prefix(engine):
    engine.generate(PROMPTS, PARAMS)
    engine.submit(PROMPTS[1], replace(PARAMS, max_new_tokens=60))  # more than three steps emit
    for _ in range(3):
        engine.step()
    engine.update_weights_from_tensor(random_weights(engine, 1), flush_cache=False)
    assert engine.scheduler.num_running == 1
    assert engine.worker.memory.usage.cached == 0
    again = engine.submit(PROMPTS[1], PARAMS)
    (rollout,) = (r for r in run_out(engine) if r.request_id == again.request_id)
    assert set(rollout.weight_versions) == {1}
    assert rollout.logprobs == engine.score(PROMPTS[1], rollout.token_ids, PARAMS)


@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_a_rollout_has_all_of_its_counts_where_steps_are_booked_later(tiny_model_path, spec):
    """On a GPU steps are booked while the next one runs, or when the request ends."""
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec=spec, max_running=4)
    engine.worker._learning.is_deferred = True
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    for rollout in engine.generate([[5, 6, 7], [8, 9]], params):
        stats = rollout.stats
        assert stats.verify_steps + stats.accepted == len(rollout.token_ids) == 12
        assert stats.forward_ms > 0


def test_abort_hands_out_what_there_is(engine):
    request = engine.submit(PROMPTS[0], PARAMS)
    waiting = engine.submit(PROMPTS[1], PARAMS)
    engine.step()
    engine.step()
    engine.abort(request.request_id)
    engine.abort(12345)
    rollout = next(r for r in engine.step() if r.request_id == request.request_id)
    assert rollout.finish_reason is FinishReason.ABORT
    assert len(rollout.token_ids) >= 2
    engine.abort(waiting.request_id)
    assert [r.request_id for r in engine.step()] == [waiting.request_id]
    assert not engine.has_unfinished


def test_nothing_of_the_old_weights_is_met_when_leaving_them_fails(
    engine, tiny_model_path, monkeypatch
):
    """No failure between two policies lets one continue the other's prefixes."""
    new = random_weights(engine, 3)
    fresh = RolloutEngine.from_pretrained(tiny_model_path, spec="none")
    fresh.update_weights_from_tensor(new)
    expected = outcome(fresh.generate(PROMPTS, PARAMS))
    engine.generate(PROMPTS, PARAMS)
    engine.submit(PROMPTS[0], PARAMS)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.requests, "rollout", lambda request: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.update_weights_from_tensor(new, abort_all_requests=True)
    assert not engine.can_run
    engine.update_weights_from_tensor(new)
    assert outcome(engine.generate(PROMPTS, PARAMS)) == expected


def test_a_prompt_that_memory_cannot_hold_is_refused(tiny_model_path):
    engine = RolloutEngine.from_pretrained(tiny_model_path, max_kv_tokens=40)
    with pytest.raises(OutOfMemoryError, match="memory"):
        engine.generate([[1] * 41], PARAMS)
    assert len(engine.generate([[1] * 20], PARAMS)) == 2


def test_metrics_add_up(engine):
    rollouts = engine.generate(PROMPTS, PARAMS)
    metrics = engine.metrics()
    assert metrics.generated_tokens == sum(len(r.token_ids) for r in rollouts)
    assert metrics.target_forwards == sum(r.stats.verify_steps for r in rollouts)
    assert metrics.accepted == sum(r.stats.accepted for r in rollouts)
    assert metrics.generated_tokens == metrics.target_forwards + metrics.accepted
    assert metrics.drafted == sum(r.stats.drafted for r in rollouts)
    assert metrics.finished == 6
    assert 0 < metrics.forward_ms < metrics.total_ms
    shared = sum(r.stats.forward_ms for r in rollouts)
    assert shared == pytest.approx(metrics.forward_ms)
    assert sum(r.stats.draft_ms for r in rollouts) == pytest.approx(metrics.draft_ms)
    engine.reset_metrics()
    assert engine.metrics().steps == 0


def test_status_is_a_copy_of_what_the_engine_does(tiny_model_path):
    engine = RolloutEngine.from_pretrained(tiny_model_path, max_running=2)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    for index in range(3):
        engine.submit([5 + index, 6, 7], params)
    engine.step()
    before = engine.status()
    assert (before.running, before.waiting, before.unavailable_reason) == (2, 1, "")
    assert before.weight_versions == engine.weight_versions
    assert 0 < before.kv_used < before.kv_slots
    while engine.has_unfinished:
        engine.step()
    engine.pause_generation()
    after = engine.status()
    assert (after.running, after.waiting, after.total.finished) == (0, 0, 3)
    assert "paused" in after.unavailable_reason
    assert before.total.finished == 0


def test_an_engine_goes_with_the_last_reference_to_it(tiny_model_path, made_engines):
    """An engine's corpus, groups and senders' memory do not wait for the garbage collector."""
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec="none", num_threads=1)
    engine.generate(PROMPTS, PARAMS)
    held = weakref.ref(engine)
    made_engines.clear()  # else it would hold on to it
    del engine
    assert held() is None
