"""A planted fault is the first suspect; a clean pair has none."""

from __future__ import annotations

import pytest

from rollout.trainers.mismatch import Cause, compare
from tests.helpers.planted_faults import FAULTS, planted
from tests.trainers.mismatch.conftest import Pair

OPTIONS = {"positions": {"left_padding": 5}}


def test_every_cause_has_a_fault() -> None:
    assert set(FAULTS) == set(Cause)


@pytest.mark.parametrize("cause", FAULTS)
def test_the_first_suspect_is_the_fault(pairs: dict[str, Pair], cause: str) -> None:
    pair = pairs["bfloat16" if cause == "rounding" else "float32"]
    if cause == "router" and pair.engine.worker.weights.parts["target"].spec.experts is None:
        pytest.skip("a dense model has no router")
    rollouts = pair.rollouts(temperature=0.7) if cause == "sampling" else pair.sampled
    with planted(cause, pair.model()) as model:
        found = compare(model, pair.engine, rollouts, **OPTIONS.get(cause, {}))
    assert [str(each.cause) for each in found.suspects][:1] == [cause], found.suspects
