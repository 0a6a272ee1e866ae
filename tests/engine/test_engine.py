"""The engine's calls on a real, tiny model."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout import FinishReason, RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError, OutOfMemoryError, WeightUpdateError
from tests.helpers.compared import outcome

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 12]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=24, seed=3, n=2, ignore_eos=True)


@pytest.fixture
def engine(tiny_model_path):
    return RolloutEngine.from_pretrained(tiny_model_path, max_running=4)


@pytest.fixture(scope="module")
def idle(tiny_model_path):
    """An engine for tests that leave it as it was."""
    return RolloutEngine.from_pretrained(tiny_model_path, max_running=4)


def random_weights(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    weight_loaders = engine.worker.target.model.weight_loaders()
    return [
        (name, torch.randn(d.shape, generator=generator) * 0.2)
        for name, d in weight_loaders.items()
    ]


def test_generate_is_in_prompt_order_and_stream_as_they_finish(engine):
    rollouts = engine.generate(PROMPTS, PARAMS)
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [
        (p, s) for p in range(3) for s in range(2)
    ]
    assert [r.prompt_ids for r in rollouts[::2]] == PROMPTS
    assert all(r.finish_reason is FinishReason.LENGTH for r in rollouts)
    assert all(len(r.logprobs) == len(r.weight_versions) == 24 for r in rollouts)
    lengths = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (30, 3, 12)]
    assert [len(r.token_ids) for r in engine.stream(PROMPTS, lengths)] == [3, 12, 30]


def test_streams_may_be_interleaved(engine):
    alone = outcome(engine.generate(PROMPTS, PARAMS))
    first, second = engine.stream(PROMPTS, PARAMS), engine.stream(PROMPTS, PARAMS)
    pairs = list(zip(first, second, strict=True))
    assert len(pairs) == 6
    assert sorted(outcome(r for r, _ in pairs)) == sorted(outcome(r for _, r in pairs))
    assert sorted(outcome(r for r, _ in pairs)) == sorted(alone)
    assert not engine.has_unfinished


def test_broken_logits_end_their_request_alone(engine):
    good = outcome(engine.generate(PROMPTS[:2], PARAMS))
    embedding = engine.worker.target.model.weight_loaders()["model.embed_tokens.weight"]
    whole = embedding.read()
    broken = whole.clone()
    broken[12] = float("nan")  # only the third prompt holds this token
    engine.update_weights_from_tensor({"model.embed_tokens.weight": broken}.items(), partial=True)
    rollouts = engine.generate(PROMPTS, PARAMS)
    assert {r.finish_reason for r in rollouts[4:]} == {FinishReason.ERROR}
    assert "NaN" in rollouts[4].error
    ends = [r for r in rollouts[:4] if r.finish_reason is not FinishReason.ERROR]
    assert all(o in good for o in outcome(ends))
    engine.check_integrity()
    assert engine.worker.memory.usage.used == 0
    engine.update_weights_from_tensor([("model.embed_tokens.weight", whole)], partial=True)
    assert outcome(engine.generate(PROMPTS[:2], PARAMS)) == good


def test_a_refused_update_leaves_running_requests_alone(engine):
    engine.submit(PROMPTS[0], PARAMS)
    for _ in range(3):
        engine.step()
    used = engine.worker.memory.usage.used
    with pytest.raises(InvalidInputError, match="misspelt"):
        engine.update_weights_from_tensor(
            {"misspelt": torch.zeros(1)}.items(), abort_all_requests=True
        )
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
    rollouts = {}
    while engine.has_unfinished:
        rollouts |= {r.request_id: r for r in engine.step()}
    assert set(rollouts[again.request_id].weight_versions) == {1}
    fresh = engine.score(PROMPTS[1], rollouts[again.request_id].token_ids, PARAMS)
    assert rollouts[again.request_id].logprobs == fresh
    engine.check_integrity()


@pytest.mark.parametrize(
    "options", [{"request_seed": -1}, {"request_seed": 2**64}, {"prompt_index": -2}]
)
def test_bad_seeds_are_refused_at_submit(idle, options):
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        idle.submit(PROMPTS[0], PARAMS, **options)
    assert not idle.has_unfinished


def test_leaving_a_stream_early_frees_its_requests(engine):
    for _ in engine.stream(PROMPTS, PARAMS):
        break
    assert not engine.has_unfinished
    engine.check_integrity()
    assert engine.worker.memory.usage.used == 0


def test_samples_of_a_prompt_differ_and_seeds_repeat(engine):
    first = engine.generate(PROMPTS, PARAMS)
    assert first[0].token_ids != first[1].token_ids
    assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(first)
    other = SamplingParams(temperature=0.9, max_new_tokens=24, seed=4, n=2, ignore_eos=True)
    assert outcome(engine.generate(PROMPTS, other)) != outcome(first)


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


def test_siblings_prefill_their_prompt_once(tiny_model_path):
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec="none", max_running=8)
    prompt = np.random.default_rng(0).integers(3, 97, 100).tolist()
    rollouts = engine.generate([prompt], SamplingParams(n=6, max_new_tokens=4, ignore_eos=True))
    assert sorted(r.stats.cached_tokens for r in rollouts) == [0, 99, 99, 99, 99, 99]


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


def test_new_weights_change_the_samples_bump_the_version_and_keep_the_corpus(engine):
    before = engine.generate(PROMPTS, PARAMS)
    held = engine.worker.counters()
    corpus_tokens = engine.worker.corpus.num_tokens
    engine.update_weights_from_tensor(random_weights(engine, 1))
    assert engine.weight_version == 1
    assert engine.worker.corpus.num_tokens == corpus_tokens > 0
    assert engine.worker.memory.usage.cached == 0 < held["kv/cached"]
    after = engine.generate(PROMPTS, PARAMS)
    assert outcome(after) != outcome(before)
    assert {v for r in after for v in r.weight_versions} == {1}


@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_requests_in_flight_go_on_under_the_new_weights(tiny_model_path, spec):
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec=spec, max_running=4)
    request = engine.submit(PROMPTS[0], PARAMS)
    for _ in range(5):
        engine.step()
    done = len(request.token_ids)
    engine.update_weights_from_tensor(random_weights(engine, 2))
    rollouts = []
    while engine.has_unfinished:
        rollouts += engine.step()
    versions = rollouts[0].weight_versions
    assert versions == [0] * done + [1] * (24 - done)
    # From the cut on it is what an engine with the new weights makes of the same beginning.
    scored = engine.score(PROMPTS[0], rollouts[0].token_ids, PARAMS)
    assert scored[done:] == rollouts[0].logprobs[done:]


def test_a_bad_update_is_refused_before_a_byte_moves(engine):
    before = engine.generate(PROMPTS, PARAMS)
    good = random_weights(engine, 3)
    for bad in (
        [*good, ("model.layers.9.nonsense", torch.zeros(2))],
        [*good[:-1], (good[-1][0], torch.zeros(3, 3))],
        [*good[:-1], (good[-1][0], torch.zeros(good[-1][1].shape, dtype=torch.int32))],
    ):
        with pytest.raises(InvalidInputError, match="named_tensors"):
            engine.update_weights_from_tensor(bad)
    assert engine.weight_version == 0
    assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(before)


def test_a_torn_update_serves_nothing_until_a_full_one(engine):
    good = random_weights(engine, 3)

    def dies():
        yield from good[:4]
        raise ConnectionError("the trainer went away")

    with pytest.raises(ConnectionError):
        engine.update_weights_from_tensor(dies())
    with pytest.raises(WeightUpdateError, match="stopped after 4 tensors"):
        engine.generate(PROMPTS, PARAMS)
    with pytest.raises(InvalidInputError, match="missing"):
        engine.update_weights_from_tensor(good[:4])
    engine.update_weights_from_tensor(good)
    mended = engine.generate(PROMPTS, PARAMS)
    assert {v for r in mended for v in r.weight_versions} == {1}


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


@pytest.mark.parametrize(
    "tensors",
    [
        None, "weights", [1, 2], [("name",)], [(1, torch.zeros(1))],
        iter([5]), iter([None]), iter([("lm_head.weight",)]), iter([(1, 2)]),
        iter([("lm_head.weight", None)]),
    ],
)  # fmt: skip
def test_what_is_no_named_tensor_is_refused(idle, tensors):
    with pytest.raises(InvalidInputError, match="named_tensors"):
        idle.update_weights_from_tensor(tensors)
    assert idle.can_run


def test_a_fresh_engine_with_the_same_weights_gives_the_same(engine, tiny_model_path):
    weights = random_weights(engine, 5)
    engine.generate(PROMPTS, PARAMS)
    engine.update_weights_from_tensor(weights)
    fresh = RolloutEngine.from_pretrained(tiny_model_path, spec="none")
    fresh.update_weights_from_tensor(iter(weights))
    assert outcome(engine.generate(PROMPTS, PARAMS)) == outcome(fresh.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[1, 2], []], r"prompts\[1\].*empty"),
        ([[1, 97]], r"prompts\[0\]=97.*\[0, 97\)"),
        ([[-1]], r"prompts\[0\]=-1"),
        ([[1, 2.5]], r"prompts\[0\].*integers"),
        (["text"], r"prompts\[0\].*tokenizer"),
        ([[1] * 512], r"len\(prompts\[0\]\)=512.*511"),
        ([1, 2, 3], "list of prompts"),
    ],
)
def test_bad_prompts_are_named_and_nothing_is_started(idle, prompts, says):
    with pytest.raises(InvalidInputError, match=says):
        idle.generate(prompts, PARAMS)
    assert not idle.has_unfinished


def test_a_prompt_that_memory_cannot_hold_is_refused(tiny_model_path):
    engine = RolloutEngine.from_pretrained(tiny_model_path, max_kv_tokens=40)
    with pytest.raises(OutOfMemoryError, match="memory"):
        engine.generate([[1] * 41], PARAMS)
    assert len(engine.generate([[1] * 20], PARAMS)) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -2),
        ("min_p", 1.0),
        ("n", 0),
        ("max_new_tokens", 0),
        ("min_new_tokens", 300),
        ("repetition_penalty", 0.0),
        ("stop", [""]),
        ("stop", "END"),
        ("n", 2.5),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {0.5: 1.0}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", [1]),
        ("stop", [3]),
        ("stop_token_ids", 3),
        ("stop_token_ids", ["x"]),
        ("temperature", 10**400),
        ("temperature", 1e300),
        ("temperature", None),
        ("top_p", 1e-300),  # none in float32
        ("top_p", "x"),
        ("min_p", []),
        ("top_k", True),
        ("top_k", 2**64),
    ],
)
def test_bad_sampling_params_name_the_field(field, value):
    with pytest.raises(InvalidInputError, match=f"sampling.{field}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "odd",
    [
        {"top_k": 2**31 - 1},
        {"top_p": 1.2e-38},
        {"min_p": 1e-300},
        {"temperature": 1e-300},
        {"temperature": 3e38},
        {"repetition_penalty": 2**100},
        {"repetition_penalty": 1e-300},
        {"frequency_penalty": 3e38, "presence_penalty": -3e38},
        {"frequency_penalty": 2**100, "presence_penalty": 2**100},
        {"logit_bias": {5: 2**100, 6: -3e38}},
        {"max_new_tokens": 10**400},
        {"top_logprobs": 100, "entropy": True, "raw_logprobs": True},
    ],
)
def test_extreme_parameters_harm_nobody_else(idle, odd):
    plain = SamplingParams(temperature=0.8, max_new_tokens=8, seed=2, ignore_eos=True)
    (expected,) = idle.generate([[5, 6, 7]], plain)
    request = idle.submit([5, 6, 7], plain)
    extreme = idle.submit([8, 9], SamplingParams(**{"max_new_tokens": 6} | odd))
    ended = {}
    while request.request_id not in ended:
        ended |= {rollout.request_id: rollout for rollout in idle.step()}
    idle.abort(extreme.request_id)
    assert ended[request.request_id].token_ids == expected.token_ids
    idle.step()
    idle.check_integrity()


def test_unknown_names_list_the_known(tiny_model_path):
    with pytest.raises(InvalidInputError, match="ngram"):
        RolloutEngine.from_pretrained(tiny_model_path, spec="nonsense")
    with pytest.raises(InvalidInputError, match="max_running"):
        RolloutEngine.from_pretrained(tiny_model_path, max_runing=4)
    with pytest.raises(InvalidInputError, match="num_draft_tokens"):
        RolloutEngine.from_pretrained(tiny_model_path, spec_options={"draft": 4})
    with pytest.raises(InvalidInputError, match="dtype"):
        RolloutEngine.from_pretrained(tiny_model_path, dtype="int3")


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
