"""Halves of the running requests that take turns, two steps under way.

That nothing of it can be seen in what is generated is in the matrix.
"""

from __future__ import annotations

import pytest

from rollout import RolloutEngine
from tests.helpers.compared import numbers
from tests.helpers.parity_models import PARAMS, prompts

LONG, SHORT = prompts()[2], prompts()[0]
PROMPTS = [SHORT, LONG, [*LONG, 7]]


@pytest.fixture
def engine(tiny_model_path) -> RolloutEngine:
    return RolloutEngine.from_pretrained(tiny_model_path, "none", max_running=4, overlap="always")


def test_a_stream_keeps_its_order(tiny_model_path, engine):
    plain = RolloutEngine.from_pretrained(tiny_model_path, "none", max_running=4, overlap="never")
    wanted = numbers(plain.stream(PROMPTS, PARAMS["sampled"]))
    assert numbers(engine.stream(PROMPTS, PARAMS["sampled"])) == wanted
    early = engine.stream(PROMPTS, PARAMS["sampled"])
    first = [next(early) for _ in range(3)]
    early.close()
    assert numbers(first) == wanted[:3]
    assert not engine.has_unfinished
    engine.check_integrity()
    assert sorted(numbers(engine.generate(PROMPTS, PARAMS["sampled"]))) == sorted(wanted)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_a_pause_finishes_what_is_under_way(engine, mode):
    for index, prompt in enumerate(PROMPTS):
        engine.submit(prompt, PARAMS["greedy"], prompt_index=index)
    while not engine.steps._under_way:
        engine.step()
    engine.pause_generation(mode)
    assert not engine.steps._under_way
    engine.check_integrity()
