"""Errors cross processes."""

from __future__ import annotations

import pickle

from rollout.errors import InvalidInputError


def test_an_invalid_input_keeps_its_parts_in_a_pickle():
    error = pickle.loads(pickle.dumps(InvalidInputError("max_running", 0, "must be >= 1")))
    assert (error.field, error.value, error.remedy) == ("max_running", 0, "must be >= 1")
    assert str(error) == "max_running=0: must be >= 1"


def test_a_message_is_short_whatever_the_value():
    deep = []
    for _ in range(5000):
        deep = [deep]
    for value in (10**5000, deep, {"a": 10**5000}, "x" * 10**6, [7] * 10**6):
        assert len(str(InvalidInputError("n", value, "is too much"))) < 150
