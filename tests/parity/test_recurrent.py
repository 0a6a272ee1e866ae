"""Targets with recurrent layers: transformers' numbers, also with few slots for states."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.errors import OutOfMemoryError
from tests.helpers.compared import numbers
from tests.helpers.parity_models import PARAMS, prompts
from tests.helpers.tiny_hybrid import save_tiny_chain, tiny_hybrid
from tests.helpers.transformers_answers import assert_logprobs

FAMILIES = {"qwen3_5": False, "qwen3_next": True}  # whether with experts


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    """A target of one family, without experts, in bfloat16."""
    folder = tmp_path_factory.mktemp("recurrent")
    save_tiny_chain(folder, "qwen3_next")
    return folder


def make_engine(folder, **options) -> RolloutEngine:
    return RolloutEngine.from_pretrained(folder, "none", dtype="bfloat16", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(family, tmp_path):
    experts = FAMILIES[family]
    save_tiny_chain(tmp_path, family, experts=experts)
    engine = RolloutEngine.from_pretrained(tmp_path, "none", max_running=3, chunk_len=7)
    rollouts = engine.generate(prompts(), SamplingParams(max_new_tokens=20, seed=3))
    assert_logprobs(rollouts, tiny_hybrid(family, experts=experts))


def test_with_states_for_one_request_nothing_is_cached(recurrent):
    wanted = make_engine(recurrent, max_running=1, prefix_cache=False)
    engine = make_engine(recurrent, max_running=8, state_slots=2, state_interval=16)
    rollouts = engine.generate(prompts(), PARAMS["shaped"])
    assert numbers(rollouts) == numbers(wanted.generate(prompts(), PARAMS["shaped"]))
    engine.check_integrity()
    assert engine.worker.counters()["states/used"] == 0
    assert engine.worker.memory.counters.hit == 0


def test_scoring_needs_the_states_of_one_request(recurrent):
    engine = make_engine(recurrent, max_running=4, state_slots=4)
    [rollout] = engine.generate(prompts()[:1], PARAMS["greedy"])
    for prompt in prompts()[1:3]:
        engine.submit(prompt, PARAMS["greedy"])
    engine.step()
    with pytest.raises(OutOfMemoryError, match=r"all 4 state slots; raise memory\.state_slots"):
        engine.score(rollout.prompt_ids, rollout.token_ids)
    while engine.has_unfinished:
        engine.step()
    scored = engine.score(rollout.prompt_ids, rollout.token_ids, PARAMS["greedy"])
    assert scored == rollout.logprobs
