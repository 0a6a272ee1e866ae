"""Answers have the experts of each token, as trainers that replay routes read them."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from transformers import AutoTokenizer

from rollout import RolloutEngine, SamplingParams
from tests.helpers.tiny_moe import save_tiny_moe
from tests.server.conftest import events_of, post, run_server

PROMPTS = [[5, 6, 7, 8], [9, 10]]
SAMPLING = {"temperature": 0.9, "seed": 5, "ignore_eos": True}
ASKED = {"return_routed_experts": True}


@pytest.fixture(scope="module")
def folder(text_model_path, tmp_path_factory):
    path = save_tiny_moe(tmp_path_factory.mktemp("moe"))
    AutoTokenizer.from_pretrained(text_model_path).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def client(folder):
    with run_server(folder, {"record_routes": True}, {}) as live, live.client() as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder) -> list[np.ndarray]:
    engine = RolloutEngine.from_pretrained(folder, record_routes=True)
    params = SamplingParams(**SAMPLING, max_new_tokens=6, routed_experts=True)
    return [rollout.routed_experts for rollout in engine.generate(PROMPTS, params)]


def routes_of(answer) -> np.ndarray:
    values = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    return values.reshape(-1, 2, 3)


def test_sglangs_answers_and_streams_have_them(client, expected):
    body = {"input_ids": PROMPTS, "sampling_params": SAMPLING | {"max_new_tokens": 6}} | ASKED
    answers = post(client, "/generate", **body)
    for answer, routes, prompt in zip(answers, expected, PROMPTS, strict=True):
        assert len(routes_of(answer)) == len(prompt) + 6 - 1
        assert np.array_equal(routes_of(answer), routes)
    with client.stream("POST", "/generate", json=body | {"stream": True}) as stream:
        last = {each["index"]: each for each in events_of(stream)}
    assert all(np.array_equal(routes_of(last[index]), expected[index]) for index in range(2))
    body |= {"return_routed_experts": [True, False], "routed_experts_start_len": [3, 0]}
    later, without = post(client, "/generate", **body)
    assert np.array_equal(routes_of(later), expected[0][3:])
    assert "routed_experts" not in without["meta_info"]


def test_openais_and_vllms_answers_have_them_in_numpys_form(client, expected):
    sampling = SAMPLING | {"max_tokens": 6}
    for path, body in (
        ("/v1/completions", {"prompt": PROMPTS[0]} | sampling),
        ("/inference/v1/generate", {"token_ids": PROMPTS[0], "sampling_params": sampling}),
    ):
        (choice,) = post(client, path, **body, **ASKED)["choices"]
        routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        assert np.array_equal(routes, expected[0])
        assert "routed_experts" not in post(client, path, **body)["choices"][0]
    body["sampling_params"] = sampling | {"routed_experts_prompt_start": 3}
    (choice,) = post(client, path, **body, **ASKED)["choices"]
    routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert np.array_equal(routes, expected[0][3:])
    (choice,) = post(client, "/skyrl/v1/generate", **body)["choices"]
    found = choice["routed_experts"]
    assert list(found) == ["data", "shape", "dtype"]  # SkyRL finds the data by its place
    assert found["dtype"] == "uint8"
    values = np.frombuffer(base64.b64decode(found["data"]), np.uint8).reshape(found["shape"])
    assert np.array_equal(values, expected[0][3:])
    body["sampling_params"] = sampling | {"routed_experts_prompt_start": 5}
    wrong = client.post(path, json=body).json()["error"]["param"]
    assert wrong == "sampling_params.routed_experts_prompt_start"
    assert client.post("/skyrl/v1/generate", json=body | {"stream": True}).status_code == 400
