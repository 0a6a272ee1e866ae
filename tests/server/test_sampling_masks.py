"""The tokens that truncation left, and logprobs of given tokens, as each dialect tells them."""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest

from rollout import Rollout, RolloutEngine, SamplingParams
from tests.server.conftest import events_of

PROMPT = [5, 6, 7]
SAMPLING = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 5}
GENERATE = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"max_new_tokens": 9}}
TOKENS = {"token_ids": PROMPT, "sampling_params": SAMPLING | {"max_tokens": 9}}
COMPLETION = {"prompt": PROMPT, "max_tokens": 9} | SAMPLING
CHAT = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 9} | SAMPLING


@pytest.fixture(scope="module")
def expected(offline: RolloutEngine) -> Rollout:
    """What all calls but the chat must tell."""
    (rollout,) = offline.generate(
        [PROMPT],
        SamplingParams(
            **SAMPLING, max_new_tokens=9, sampling_mask=True, sampling_logprobs=True,
            logprob_token_ids=[9, 4],
        ),
    )  # fmt: skip
    assert len({len(mask) for mask in rollout.extras.sampling_masks}) > 1
    return rollout


def post(client: httpx.Client, path: str, *bodies: dict[str, Any], **fields: Any) -> Any:
    body: dict[str, Any] = {}
    for each in (*bodies, fields):
        body |= each
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        return list(events_of(answer))


def int32(text: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), dtype=np.int32).tolist()


def test_sglangs_and_slimes_forms(client, expected) -> None:
    masks = expected.extras.sampling_masks
    body = GENERATE | {"return_sampling_mask": True}
    for meta in (
        post(client, "/generate", body)["meta_info"],
        events(client, "/generate", body)[-1]["meta_info"],
    ):
        assert meta["output_token_sampling_mask"] == masks
        assert meta["output_token_sampling_mask_length"] == len(masks)
        assert meta["output_token_sampling_logprobs"] == expected.extras.sampling_logprobs
        assert "top_p_token_ids" not in meta
    custom = {"custom_params": {"return_top_p_token_ids": True}}
    sampling = GENERATE["sampling_params"] | custom
    meta = post(client, "/generate", GENERATE, sampling_params=sampling)["meta_info"]
    ids, offsets = int32(meta["top_p_token_ids"]), int32(meta["top_p_token_offsets"])
    assert [ids[a:b] for a, b in pairwise(offsets)] == masks
    assert "output_token_sampling_mask" not in meta
    uncut = {"max_new_tokens": 2} | custom
    meta = post(client, "/generate", GENERATE, sampling_params=uncut)["meta_info"]
    assert "top_p_token_ids" not in meta  # slime asks, and reads it only where top_p is not 1


def test_vllms_form(client, expected) -> None:
    """Also where nobody asks, on the call of clients whose servers have an option for it."""
    masks = expected.extras.sampling_masks
    asked = {"return_sampling_mask": True}
    tokens_in = "/inference/v1/generate"
    for body in (TOKENS, TOKENS | asked):
        assert post(client, tokens_in, body)["choices"][0]["sampling_mask"] == masks
    body = TOKENS | {"return_sampling_mask": False}
    assert "sampling_mask" not in post(client, tokens_in, body)["choices"][0]
    uncut = {"sampling_params": {"max_tokens": 2}}
    assert "sampling_mask" not in post(client, tokens_in, TOKENS, uncut)["choices"][0]
    for path, body in ((tokens_in, TOKENS), ("/v1/completions", COMPLETION | asked)):
        streamed: list[list[int]] = []
        for event in events(client, path, body):
            streamed += event["choices"][0]["sampling_mask"]
        assert streamed == masks
    (choice,) = post(client, "/v1/completions", COMPLETION, asked)["choices"]
    assert choice["sampling_mask"] == masks
    assert "sampling_mask" not in post(client, "/v1/completions", COMPLETION)["choices"][0]


def test_skyrls_rows_and_logprobs_over_them(client, expected) -> None:
    """A row is empty where more tokens tie for its last place than it holds."""
    path, asked = "/skyrl/v1/generate", {"return_sample_support": True}
    (choice,) = post(client, path, TOKENS, asked)["choices"]
    support = choice["rollout_sample_support"]
    assert list(support) == ["data", "shape", "dtype"]  # SkyRL finds the data by its place
    assert (support["shape"], support["dtype"]) == ([9, 20], "int32")
    rows = np.array(int32(support["data"])).reshape(9, 20)
    assert [row[row >= 0].tolist() for row in rows] == expected.extras.sampling_masks
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert logprobs == expected.extras.sampling_logprobs
    tied = TOKENS["sampling_params"] | {"logit_bias": dict.fromkeys("789", 1e9), "top_k": 2}
    (choice,) = post(client, path, TOKENS, asked, sampling_params=tied)["choices"]
    assert set(int32(choice["rollout_sample_support"]["data"])) == {-1}
    assert choice["logprobs"]["content"][0]["logprob"] == pytest.approx(np.log(1 / 3))
    one = TOKENS | asked | {"sampling_params": TOKENS["sampling_params"] | {"top_k": 1}}
    assert client.post(path, json=one).json()["error"]["param"] == "sampling_params.top_k"


def test_logprobs_of_given_tokens(client, expected) -> None:
    wanted = expected.extras.token_ids_logprobs
    asked = {"return_logprob": True, "logprob_start_len": 1, "token_ids_logprob": [9, 4]}
    meta = post(client, "/generate", GENERATE, asked)["meta_info"]
    told = meta["output_token_ids_logprobs"]
    assert [[(token, value) for value, token, _ in each] for each in told] == wanted
    assert [[token for _, token, _ in each] for each in meta["input_token_ids_logprobs"]] == [
        [9, 4]
    ] * 2
    asked = {"logprobs": 0, "logprob_token_ids": [9, 4], "return_tokens_as_token_ids": True}
    (choice,) = post(client, "/v1/completions", COMPLETION, asked)["choices"]
    for each, pairs in zip(choice["logprobs"]["top_logprobs"], wanted, strict=True):
        assert {f"token_id:{token}": value for token, value in pairs}.items() <= each.items()
    sampling = TOKENS["sampling_params"] | {"logprobs": 0, "logprob_token_ids": [9, 4]}
    answer = post(client, "/inference/v1/generate", TOKENS, sampling_params=sampling)
    for each, pairs in zip(answer["choices"][0]["logprobs"]["content"], wanted, strict=True):
        tops = [(entry["token"], entry["logprob"]) for entry in each["top_logprobs"]]
        assert tops == [(f"token_id:{token}", value) for token, value in pairs]


def test_allowed_tokens_and_bad_words(client) -> None:
    words = {"prompt": "one two", "temperature": 30.0, "max_tokens": 40, "seed": 1}
    allowed = {"allowed_token_ids": [7, 8, 9]}
    for bad in ([], ["three"]):
        (choice,) = post(client, "/v1/completions", words, allowed, bad_words=bad)["choices"]
        written = set(choice["text"].split())
        assert written == {"one", "two", "three"} - set(bad)
