"""Long or wrong bodies hold up nobody else; answers are JSON whatever they repeat of a client's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from starlette.types import Message

from rollout.server.body_fields import Listed
from rollout.server.json_route import Integers, JsonRequest, json_bytes
from rollout.server.openai.completions import CompletionBody
from rollout.server.sglang.generate_body import GenerateBody
from tests.server.conftest import Live

LONG = list(range(50_000, 51_000)) * 20  # more than is parsed at once
JSON = {"Content-Type": "application/json"}


def test_others_go_on_while_a_long_body_is_parsed() -> None:
    """A parser that held the interpreter's lock would leave them no turn while it is at work."""
    body = json.dumps({"input_ids": LONG * 100}).encode()

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def turns_of_others() -> tuple[int, Any]:
        parsing = asyncio.create_task(JsonRequest({"type": "http"}, receive).json())
        turns = 0
        while not parsing.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns, parsing.result()

    turns, value = asyncio.run(turns_of_others())
    assert turns >= 10  # of the two hundred that its chunks allow
    assert type(value["input_ids"]) is Integers
    assert GenerateBody.model_validate(value).input_ids is value["input_ids"]
    assert CompletionBody.model_validate({"prompt": [value["input_ids"]]}).prompts == [LONG * 100]


@pytest.mark.parametrize(
    ("path", "field", "status"),
    [("/generate", "input_ids", 422), ("/v1/completions", "prompt", 400)],
)
def test_long_bodies_are_refused_as_short_ones_are(
    live: Live, path: str, field: str, status: int
) -> None:
    with live.client() as client:

        def refused(value: Any, expected: int = status) -> Any:
            answer = client.post(path, json={field: value})
            assert answer.status_code == expected, answer.text
            return answer.json()["error"]["param"]

        assert refused(LONG) == refused([LONG]) == refused([[5], LONG]) == "len(prompt)"
        for wrong in ([1.5], [[True]], [["x"]], [[5], 5, LONG], ["x", 5], [[5.0], LONG]):
            param = refused(wrong)
            assert refused([*wrong, *["x"] * 20_000]).split(".")[0] == param.split(".")[0] == field
        half = json.dumps({field: LONG}).encode()[:-5]
        answer = client.post(path, content=half, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400, "the body is not JSON",
        )  # fmt: skip


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_body_that_is_not_declared_to_be_json_is_told_so(live: Live, path: str) -> None:
    with live.client() as client:
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/json"):
            answer = client.post(path, content=b"{}", headers={"Content-Type": kind})
            assert answer.status_code == 415, kind
            assert "Content-Type: application/json" in answer.json()["error"]["message"]
        kind = "Application/JSON; charset=utf-8"
        taken = client.post(path, content=b'{"text": 3}', headers={"Content-Type": kind})
        assert taken.status_code in (400, 422)
        empty = client.post(path, content=b"", headers={"Content-Type": "text/plain"})
        assert empty.status_code == taken.status_code


def test_the_first_wrong_value_is_enough(live: Live) -> None:
    """Errors about each of a million values would fill gigabytes."""
    many, half = ["x"] * 100_000, {str(token): "x" for token in range(100_000)}
    for body in (
        {"input_ids": many},
        {"input_ids": [5], "sampling_params": many},
        {"input_ids": [5], "sampling_params": {"logit_bias": half}},
    ):
        with pytest.raises(ValueError, match="validation error") as wrong:
            GenerateBody.model_validate(body)
        assert wrong.value.error_count() <= 3
    with pytest.raises(ValueError, match="validation error") as wrong:
        CompletionBody.model_validate({"prompt": [*LONG, "x"], "logit_bias": {"1": True} | half})
    assert {error["loc"][0] for error in wrong.value.errors()} == {"prompt", "logit_bias"}
    assert wrong.value.error_count() <= 5


def test_lists_that_end_at_an_error_are_documented_as_lists() -> None:
    schema = GenerateBody.model_json_schema()["properties"]["input_ids"]["anyOf"]
    integers = {"type": "array", "items": {"type": "integer"}}
    assert schema == [integers, {"type": "array", "items": integers}, {"type": "null"}]
    assert hash(Listed[int]) == hash(Listed[int])  # as members of unions must be


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
