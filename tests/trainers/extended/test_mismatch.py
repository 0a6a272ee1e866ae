"""Planted faults of the demo model are the first suspect; a clean model has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.trainers.exact import exact_forward
from rollout.trainers.mismatch import compare
from tests.helpers.planted_faults import FAULTS, planted
from tests.trainers.mismatch.conftest import Pair

PROMPTS = ["Tell me a story about a fox.", "Explain gravity to a child."]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request, demo_model_path: Path) -> Iterator[Pair]:
    found = Pair(demo_model_path, request.param, PROMPTS)
    yield found
    found.engine.close()


@pytest.mark.parametrize("cause", [cause for cause in FAULTS if cause != "router"])
def test_the_first_suspect_is_the_fault(pair: Pair, cause: str) -> None:
    if pair.dtype != "float32" and cause != "rounding":
        pytest.skip("faults are planted in float32")
    found = pair.rollouts(temperature=0.7 if cause == "sampling" else 1.0)
    with planted(cause, pair.model()) as model:
        padding = 5 if cause == "positions" else 0
        mismatch = compare(model, pair.engine, found, left_padding=padding)
    suspects = [str(each.cause) for each in mismatch.suspects]
    if cause == "rounding":
        assert suspects == ([] if pair.dtype == "float32" else ["rounding"])
        assert mismatch.engine_difference == 0
    else:
        assert suspects[0] == cause


def test_exact_training_has_no_difference(pair: Pair) -> None:
    model = pair.model()
    with exact_forward(model):
        found = compare(model, pair.engine, pair.sampled)
    assert (found.max_difference, found.max_logit_difference, found.suspects) == (0, 0, [])
    assert {op.difference for op in found.ops} == {0}
