"""JSON bodies are bounded, and answers are always valid JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fastapi import HTTPException

from rollout.server import json_route
from rollout.server.json_route import json_bytes, loads


def test_lists_and_objects_are_bounded_and_brackets_in_texts_are_not(monkeypatch) -> None:
    monkeypatch.setattr(json_route, "_MAX_CONTAINERS", 10)
    for few in (
        b"[" + b"[]," * 8 + b"{}]",
        b'{"a":[[1,2],[3]],"b":[{},{},{},{},{}]}',
        json.dumps({"a": "[{" * 99 + '\\"[' * 99, "b": ["\\", "[" * 9]}).encode(),
    ):
        assert loads(few) == json.loads(few)
    for many in (
        b"[" + b"[]," * 9 + b"{}]",
        b'{"a":' * 10 + b"[]" + b"}" * 10,
        b'["\\\\",' + b"[]," * 10 + b'"["]',
    ):
        with pytest.raises(HTTPException, match="more than 10 lists and objects"):
            loads(many)


def test_answers_are_json_whatever_they_hold() -> None:
    for text in ("plain", "naïve 日本", "\ud800", "a\udfffb", '"\\\n\0', "\U0001f600"):
        written = json_bytes({text: [text]})
        written.decode("utf-8")  # strictly
        assert json.loads(written) == {text: [text]}
    value = {
        "a": float("nan"), "b": [1.5, (float("-inf"), float("inf"))], "c": "NaN",
        "d": np.float32(0.5), "e": [np.float64(1.5), np.int64(3)], "f": np.float64("nan"),
    }  # fmt: skip
    found = json.loads(json_bytes(value), parse_constant=pytest.fail)
    assert found == {
        "a": None, "b": [1.5, [None, None]], "c": "NaN", "d": 0.5, "e": [1.5, 3], "f": None,
    }  # fmt: skip
    with pytest.raises(TypeError):
        json_bytes({"a": object()})
