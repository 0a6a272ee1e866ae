"""Answers are JSON in UTF-8, whatever they repeat of a client's."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rollout.server.json_route import json_bytes


@pytest.mark.parametrize(
    "text", ["plain", "naïve 日本", "\ud800", "a\udfffb", '"\\\n\0', "\U0001f600"]
)
def test_text_comes_back_as_it_was(text):
    written = json_bytes({text: [text]})
    written.decode("utf-8")  # strictly
    assert json.loads(written) == {text: [text]}


def test_numbers_that_json_does_not_have_are_null():
    value = {"a": float("nan"), "b": [1.5, (float("-inf"), float("inf"))], "c": "NaN"}
    found = json.loads(json_bytes(value), parse_constant=pytest.fail)
    assert found == {"a": None, "b": [1.5, [None, None]], "c": "NaN"}


def test_numbers_of_numpy_are_numbers():
    value = {"a": np.float32(0.5), "b": [np.float64(1.5), np.int64(3)], "c": np.float64("nan")}
    assert json.loads(json_bytes(value)) == {"a": 0.5, "b": [1.5, 3], "c": None}
    with pytest.raises(TypeError):
        json_bytes({"a": object()})
