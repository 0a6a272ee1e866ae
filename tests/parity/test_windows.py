"""Layers with a window and slots of their own have the bits of those that store all tokens."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.errors import OutOfMemoryError
from tests.helpers.compared import numbers
from tests.helpers.parity_models import FIXED, prompts
from tests.helpers.tiny_families import save_tiny_family

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=30, n=3, seed=5, ignore_eos=True)
WINDOW = 8  # of olmo3's tiny config, in two of three layers
SPAN = WINDOW + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_family(tmp_path_factory.mktemp("olmo3"), "olmo3")


def engine_of(folder, spec: str = "none", **options) -> RolloutEngine:
    return RolloutEngine.from_pretrained(
        str(folder), spec, dtype="float32", num_threads=1, **options
    )


@pytest.fixture(scope="module")
def wanted(folder):
    """Without slots of their own."""
    engine = engine_of(folder, window_slots=0, prefix_cache=False)
    assert engine.worker.memory.windows is None
    return numbers(engine.generate(prompts(), PARAMS))


CASES = {
    "one request at a time": ("none", {"max_running": 1, "window_slots": SPAN}),
    "scarce": ("none", {"max_running": 8, "window_slots": 3 * SPAN, "chunk_len": 5}),
    "scarce tokens too": ("none", {"max_running": 8, "window_slots": 40, "max_kv_tokens": 140}),
    "trees": ("ngram", {"window_slots": 60, "spec_options": FIXED | {"num_draft_tokens": 12}}),
    "no prefixes": ("ngram", {"prefix_cache": False, "spec_options": FIXED}),
}


@pytest.mark.parametrize("case", CASES)
def test_slots_that_are_given_back_change_no_bit(folder, wanted, case):
    spec, options = CASES[case]
    engine = engine_of(folder, spec, **options)
    assert engine.worker.memory.windows is not None
    for _ in range(2):  # the second time with prefixes
        assert numbers(engine.generate(prompts(), PARAMS)) == wanted
        engine.check_integrity()
    counters = engine.worker.counters()
    assert counters["windows/used"] == 0
    if case.startswith("scarce"):
        assert engine.metrics().preemptions > 0 or counters["windows/evicted"] > 0
    if spec == "ngram":
        assert engine.metrics().accepted > 0
    if case == "trees":
        assert counters["kv/hit"] > 0


def test_scores_are_those_of_generation_with_few_slots(folder, wanted):
    engine = engine_of(folder, window_slots=2 * SPAN, chunk_len=7)
    prompt, (output, logprobs) = prompts()[0], wanted[0][2:4]
    assert engine.score(prompt, output, PARAMS) == logprobs
    engine.check_integrity()
    assert engine.worker.counters()["windows/used"] == 0
    engine.submit(prompts()[0], PARAMS)
    engine.submit(prompts()[1], PARAMS)
    for _ in range(20):  # two run, and need all that there is
        engine.step()
    with pytest.raises(OutOfMemoryError, match=r"window slots can be had.* raise memory\.window"):
        engine.score(prompt, output, PARAMS)
    assert engine.worker.counters()["windows/used"] > 0
    engine.check_integrity()
