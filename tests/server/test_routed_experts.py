"""`/generate` with the experts of each token, as trainers that replay routes read them."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from transformers import AutoTokenizer

from rollout import RolloutEngine, SamplingParams
from tests.helpers.tiny_moe import save_tiny_moe
from tests.server.conftest import events_of, run_server

PROMPTS = [[5, 6, 7, 8], [9, 10]]
SAMPLING = {"temperature": 0.9, "max_new_tokens": 6, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(text_model_path, tmp_path_factory):
    path = save_tiny_moe(tmp_path_factory.mktemp("moe"))
    AutoTokenizer.from_pretrained(text_model_path).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def client(folder):
    with run_server(folder, {"record_routes": True}, {}) as live, live.client() as client:
        yield client


def routes_of(answer) -> np.ndarray:
    values = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    return values.reshape(-1, 2, 3)


def test_a_batch_has_those_of_offline_generation(client, folder):
    engine = RolloutEngine.from_pretrained(folder, record_routes=True)
    expected = engine.generate(PROMPTS, SamplingParams(**SAMPLING, routed_experts=True))
    body = {"input_ids": PROMPTS, "sampling_params": SAMPLING, "return_routed_experts": True}
    answers = client.post("/generate", json=body).json()
    for answer, rollout, prompt in zip(answers, expected, PROMPTS, strict=True):
        assert len(routes_of(answer)) == len(prompt) + 6 - 1
        assert np.array_equal(routes_of(answer), rollout.routed_experts)
    body |= {"return_routed_experts": [True, False], "routed_experts_start_len": [3, 0]}
    later, without = client.post("/generate", json=body).json()
    assert np.array_equal(routes_of(later), expected[0].routed_experts[3:])
    assert "routed_experts" not in without["meta_info"]


def test_a_stream_ends_with_them(client):
    body = {"input_ids": PROMPTS[0], "sampling_params": SAMPLING, "return_routed_experts": True}
    whole = client.post("/generate", json=body).json()
    with client.stream("POST", "/generate", json=body | {"stream": True}) as answer:
        *_, last = events_of(answer)
    assert np.array_equal(routes_of(last), routes_of(whole))


def test_openais_and_vllms_calls_have_them_in_numpys_form(client, folder):
    engine = RolloutEngine.from_pretrained(folder, record_routes=True)
    (expected,) = engine.generate(PROMPTS[:1], SamplingParams(**SAMPLING, routed_experts=True))
    sampling = {"temperature": 0.9, "max_tokens": 6, "seed": 5, "ignore_eos": True}
    asked = {"return_routed_experts": True}
    for path, body in (
        ("/v1/completions", {"prompt": PROMPTS[0]} | sampling),
        ("/inference/v1/generate", {"token_ids": PROMPTS[0], "sampling_params": sampling}),
    ):
        (choice,) = client.post(path, json=body | asked).json()["choices"]
        routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        assert np.array_equal(routes, expected.routed_experts)
        assert "routed_experts" not in client.post(path, json=body).json()["choices"][0]
    (choice,) = client.post("/skyrl/v1/generate", json=body).json()["choices"]
    assert choice["routed_experts"] == expected.routed_experts.tolist()
    assert client.post("/skyrl/v1/generate", json=body | {"stream": True}).status_code == 400


@pytest.mark.parametrize("start", [-1, 5])
def test_a_start_outside_the_prompt_is_refused(client, start):
    body = {"input_ids": PROMPTS[0], "routed_experts_start_len": start}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 422
    assert "routed_experts_start_len" in answer.text


def test_a_model_without_experts_says_so(live):
    body = {"input_ids": PROMPTS[0], "return_routed_experts": True}
    with live.client() as client:
        answer = client.post("/generate", json=body)
    assert answer.status_code == 422
    assert "model.record_routes" in answer.text
