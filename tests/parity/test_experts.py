"""Recorded routes of sparse models. The matrix tests that neither tokens nor routes depend on
company, drafts or chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError
from tests.helpers.parity_models import prompts
from tests.helpers.tiny_hybrid import tiny_hybrid
from tests.helpers.tiny_moe import tiny_moe
from tests.helpers.transformers_answers import chosen_experts

PARAMS = SamplingParams(
    temperature=0.9, max_new_tokens=16, n=2, seed=5, top_logprobs=1, routed_experts=True
)
FAMILIES = {
    "qwen3_moe": tiny_moe,
    "qwen3_next": lambda: tiny_hybrid("qwen3_next", experts=True),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(family)
    FAMILIES[family]().save_pretrained(folder)
    return folder


def engine_of(folder, **options) -> RolloutEngine:
    return RolloutEngine.from_pretrained(
        folder, "none", dtype="float32", record_routes=True, num_threads=1, **options
    )


@pytest.fixture(scope="module")
def plain(folder):
    engine = engine_of(folder, max_running=1, prefix_cache=False)
    return engine.generate(prompts(), PARAMS)


def test_recorded_routes_are_those_of_transformers(family, plain):
    theirs = FAMILIES[family]()
    for rollout in plain[:6]:
        expected = chosen_experts(theirs, rollout.prompt_ids + rollout.token_ids[:-1])
        assert rollout.routed_experts.dtype == np.uint8
        assert np.array_equal(rollout.routed_experts, expected)


def test_an_aborted_request_has_what_was_computed(family, folder):
    engine = engine_of(folder, chunk_len=4)
    params = SamplingParams(max_new_tokens=50, ignore_eos=True, routed_experts=True)
    unstarted, started = (engine.submit(list(range(3, 13)), params) for _ in range(2))
    engine.abort(unstarted.request_id)
    (rollout,) = engine.step()
    assert rollout.routed_experts.shape[0] == 0
    engine.abort(started.request_id)
    (rollout,) = engine.step()
    assert rollout.routed_experts.shape[0] == 4
    assert rollout.routed_experts.shape[1:] == ((2, 3) if family == "qwen3_moe" else (3, 2))


def test_what_was_computed_is_known_of_a_request_that_waits_again(folder):
    engine = engine_of(folder, max_kv_tokens=40)
    params = replace(PARAMS, max_new_tokens=30, ignore_eos=True, n=1)
    requests = [engine.submit([first, 4, 5, 6], params, prompt_index=first) for first in (8, 9)]
    while not requests[1].stats.preemptions:
        engine.step()
    assert requests[1].row < 0
    (again,) = abort(engine, requests[1])
    assert len(again.routed_experts) == len(again.prompt_ids) + len(again.token_ids) - 1
    (whole,) = engine.generate([again.prompt_ids + again.token_ids], params)
    assert np.array_equal(again.routed_experts, whole.routed_experts[: len(again.routed_experts)])


def abort(engine, request) -> list[Rollout]:
    engine.abort(request.request_id)
    return engine.take_ended()


def test_routes_that_nobody_records_are_refused(folder, tiny_model_path):
    asks = SamplingParams(max_new_tokens=3, routed_experts=True)
    engine = RolloutEngine.from_pretrained(folder, spec="none")
    with pytest.raises(InvalidInputError, match=r"routed_experts.*model\.record_routes"):
        engine.generate([[5, 6]], asks)
    with pytest.raises(InvalidInputError, match=r"record_routes.*no experts"):
        RolloutEngine.from_pretrained(tiny_model_path, record_routes=True)
