"""Halves of the running requests that take turns, two steps under way: nothing of it can be seen.

Bitwise, against an engine that finishes each step before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.overrides import engine_config
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_model import save_tiny_llama

RNG = np.random.default_rng(9)
SHARED = RNG.integers(3, 97, 40).tolist()
PROMPTS = [RNG.integers(3, 97, length).tolist() for length in (1, 64)] + [SHARED, [*SHARED, 7]]
PARAMS = {
    "sampled": SamplingParams(temperature=0.8, max_new_tokens=20, n=3, seed=5),
    "shaped": SamplingParams(
        temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1,
        presence_penalty=0.2, logit_bias={5: 2.0}, stop_token_ids=[11, 12], min_new_tokens=4,
        max_new_tokens=20, n=2, seed=6, raw_logprobs=True, top_logprobs=2, entropy=True,
    ),
}  # fmt: skip
OPTIONS = {
    "ample": {"max_running": 7},
    "chunks": {"max_running": 8, "chunk_len": 5, "max_step_tokens": 12},
    "scarce": {"max_running": 8, "max_kv_tokens": 170, "chunk_len": 9, "state_slots": 19},
}  # fmt: skip
NGRAM = {"num_draft_tokens": 8, "min_probability": 0.0, "budget": "fixed"}


def numbers(rollouts):
    return {
        (r.prompt_index, r.sample_index): (r.token_ids, r.logprobs, r.finish_reason, r.extras)
        for r in rollouts
    }


def overlapping(model: str, spec: str = "none", **options) -> RolloutEngine:
    spec_options = NGRAM if spec == "ngram" else None
    return RolloutEngine.from_pretrained(
        model, spec, spec_options=spec_options, overlap="always", **options
    )


@pytest.fixture(scope="module", params=[save_tiny_llama, save_tiny_hybrid])
def models(request, tmp_path_factory) -> list[str]:
    """A model, and other weights of it."""
    return [
        str(request.param(tmp_path_factory.mktemp(request.param.__name__), seed=seed))
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def model(models) -> str:
    return models[0]


@pytest.fixture(scope="module")
def plain(model):
    engine = RolloutEngine.from_pretrained(model, "none", max_running=4, overlap="never")
    return {name: engine.generate(PROMPTS, params) for name, params in PARAMS.items()}


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("none", "sampled", "chunks"),
        ("none", "shaped", "scarce"),
        ("ngram", "sampled", "scarce"),
        ("ngram", "shaped", "ample"),
        ("ngram", "shaped", "chunks"),
    ],
)
def test_halves_cannot_be_seen(model, plain, spec, name, options):
    engine = overlapping(model, spec, **OPTIONS[options])
    for _ in range(1 + (spec == "ngram")):  # the corpus knows every answer the second time
        rollouts = engine.generate(PROMPTS, PARAMS[name])
        assert numbers(rollouts) == numbers(plain[name])
        engine.check_integrity()
        assert engine.worker.memory.usage.used == 0
    if spec == "ngram":
        assert sum(r.stats.accepted for r in rollouts) > len(rollouts)


@pytest.mark.parametrize(("name", "scarce"), [("sampled", True), ("shaped", False)])
def test_trees_of_either_half_cannot_be_seen(model, plain, name, scarce):
    recorded = {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in plain[name]}
    factory = oracle_factory(recorded, size=12, right=0.7, chain=False)
    options = {"max_running": 6, "overlap": "always"}
    if scarce:
        options |= {"max_kv_tokens": 170, "state_slots": 14}
    engine = RolloutEngine.from_config(engine_config(model, options), factory)
    rollouts = engine.generate(PROMPTS, PARAMS[name])
    assert numbers(rollouts) == numbers(plain[name])
    assert sum(r.stats.accepted for r in rollouts) > 0
    engine.check_integrity()
    assert engine.worker.memory.usage.used == 0


def test_a_stream_keeps_its_order(model, plain):
    engines = [
        RolloutEngine.from_pretrained(model, "none", max_running=4, overlap=overlap)
        for overlap in ("never", "always")
    ]
    orders = [
        [(r.prompt_index, r.sample_index) for r in engine.stream(PROMPTS, PARAMS["sampled"])]
        for engine in engines
    ]
    assert orders[0] == orders[1]
    early = engines[1].stream(PROMPTS, PARAMS["sampled"])
    first = [next(early) for _ in range(3)]
    early.close()
    assert [(r.prompt_index, r.sample_index) for r in first] == orders[0][:3]
    assert not engines[1].has_unfinished
    engines[1].check_integrity()
    assert numbers(engines[1].generate(PROMPTS, PARAMS["sampled"])) == numbers(plain["sampled"])


def sleep_and_wake(engine: RolloutEngine) -> None:
    engine.release_memory()
    engine.resume_memory()


def pause(mode: str) -> Callable[[RolloutEngine], None]:
    def act(engine: RolloutEngine) -> None:
        engine.pause_generation(mode)
        assert not engine._under_way
        engine.continue_generation()

    return act


BETWEEN = {
    "retract": pause("retract"),
    "in_place": pause("in_place"),
    "sleep": sleep_and_wake,
    "flush": lambda engine: engine.flush_cache(),
    "score": lambda engine: engine.score([5, 6, 7], [8, 9]),
    "status": lambda engine: engine.status(),
    "integrity": lambda engine: engine.check_integrity(),
}


@pytest.mark.parametrize("act", BETWEEN)
def test_what_happens_between_two_steps_cannot_be_seen(model, plain, act):
    engine = overlapping(model, "ngram", max_running=6)
    name = "sampled"
    requests = [
        engine.submit(prompt, PARAMS[name], prompt_index=index, sample_index=sample)
        for index, prompt in enumerate(PROMPTS)
        for sample in range(PARAMS[name].n)
    ]
    ended, steps, under_way = [], 0, 0
    while engine.has_unfinished:
        ended += engine.step()
        steps += 1
        if steps % 5 == 0:
            under_way += len(engine._under_way)
            BETWEEN[act](engine)
    assert under_way > 0
    assert numbers(ended) == numbers(plain[name])
    assert len(ended) == len(requests)
    engine.check_integrity()


def test_aborted_requests_have_the_beginning_of_what_they_would_have_become(model, plain):
    engine = overlapping(model, "ngram", max_running=6)
    wanted = numbers(plain["sampled"])
    requests = [
        engine.submit(prompt, PARAMS["sampled"], prompt_index=index, sample_index=sample)
        for index, prompt in enumerate(PROMPTS)
        for sample in range(3)
    ]
    ended, rng, steps = [], np.random.default_rng(0), 0
    while engine.has_unfinished:
        ended += engine.step()
        steps += 1
        if steps % 6 == 0:
            engine.abort(int(rng.choice([request.request_id for request in requests])))
            engine.check_integrity()
    assert len(ended) == len(requests)
    aborted = [r for r in ended if r.finish_reason == "abort"]
    assert 0 < len(aborted) < len(ended)
    for rollout in ended:
        tokens, logprobs, *_ = wanted[rollout.prompt_index, rollout.sample_index]
        assert rollout.token_ids == tokens[: len(rollout.token_ids)]
        assert rollout.logprobs == logprobs[: len(rollout.logprobs)]
        if rollout not in aborted:
            assert rollout.token_ids == tokens


@pytest.mark.parametrize("fails", ["begin", "finish"])
def test_steps_that_raise_can_be_run_again(model, plain, fails, monkeypatch):
    engine = overlapping(model, "ngram", max_running=6)
    begin_step, rng = engine.worker.begin_step, np.random.default_rng(1)

    def faulty(batch):
        if fails == "begin" and rng.random() < 0.2:
            raise RuntimeError("the device is lost")
        finish, fault = begin_step(batch), rng.random() < 0.2

        def faulty_finish():
            if fails == "finish" and fault:
                raise RuntimeError("the device is lost")
            return finish()

        return faulty_finish

    monkeypatch.setattr(engine.worker, "begin_step", faulty)
    for index, prompt in enumerate(PROMPTS):
        for sample in range(3):
            engine.submit(prompt, PARAMS["sampled"], prompt_index=index, sample_index=sample)
    ended, faults = [], 0
    while engine.has_unfinished:
        try:
            ended += engine.step()
        except RuntimeError:
            faults += 1
        engine.check_integrity()
    assert faults > 5
    assert numbers(ended) == numbers(plain["sampled"])


def test_no_step_is_under_way_while_weights_change(models):
    """Tokens before an update are those of the old weights, tokens after it of the new ones."""
    outcomes = []
    for overlap in ("never", "always"):
        engine = RolloutEngine.from_pretrained(
            models[0], "ngram", spec_options=NGRAM, max_running=6, overlap=overlap
        )
        request = engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=40, ignore_eos=True))
        other = engine.submit(PROMPTS[2], SamplingParams(max_new_tokens=40, ignore_eos=True))
        while min(len(request.token_ids), len(other.token_ids)) < 10:
            engine.step()
        engine._settle()
        seen = [list(each.token_ids) for each in (request, other)]
        engine.update_weights_from_disk(models[1])
        rollouts = []
        while engine.has_unfinished:
            rollouts += engine.step()
        rollouts.sort(key=lambda r: r.request_id)
        for rollout, before in zip(rollouts, seen, strict=True):
            assert rollout.token_ids[: len(before)] == before
            assert rollout.weight_versions == [0] * len(before) + [1] * (40 - len(before))
            scored = engine.score(rollout.prompt_ids + before, rollout.token_ids[len(before) :])
            assert scored == rollout.logprobs[len(before) :]
        outcomes.append([before[:10] for before in seen])
    assert outcomes[0] == outcomes[1]
