"""HTTP in front of replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from safetensors.torch import load_file, save

from rollout import RolloutEngine, SamplingParams
from rollout.config import EngineConfig
from rollout.server.app import make_app
from rollout.server.config import ServeConfig, ServerConfig
from rollout.server.serving import Serving
from tests.cluster.thread_pool import ThreadPool
from tests.cluster.workload import PROMPTS, always_drafts
from tests.helpers.hang import wait_until
from tests.helpers.tiny_model import save_tiny_llama

SAMPLING = {"temperature": 0.9, "max_new_tokens": 30, "ignore_eos": True, "seed": 7}


@pytest.fixture
def served(make, text_config: EngineConfig) -> Iterator[tuple[TestClient, ThreadPool]]:
    cluster, pool = make(2, report_seconds=0.002, max_deaths_per_request=100)
    config = ServeConfig(model=text_config.model, server=ServerConfig())
    address = f"http://{config.server.host}:{config.server.port}"
    with (
        closing(Serving(cluster, config)) as serving,
        TestClient(make_app(serving), base_url=address) as client,
    ):
        yield client, pool


def rollouts_of(engine: RolloutEngine) -> list[tuple[list[int], list[float]]]:
    rollouts = engine.generate(PROMPTS, SamplingParams(**SAMPLING))
    return [(each.token_ids, each.logprobs) for each in rollouts]


def content(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    logprobs = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    return answer["output_ids"], logprobs


def test_answers_are_those_of_one_engine_whoever_dies(served, text_config, tmp_path: Path):
    client, pool = served
    engine = RolloutEngine.from_config(text_config, always_drafts())
    body = {"input_ids": PROMPTS, "sampling_params": SAMPLING, "return_logprob": True}
    wanted = rollouts_of(engine)
    with client.stream("POST", "/generate", json=body | {"stream": True}) as stream:
        last: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(filter(None, stream.iter_lines())):
            if number == 3:
                pool.living["replica-0"].kill()
            if line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                last[event["index"]] = event
    assert [content(last[index]) for index in sorted(last)] == wanted

    save_tiny_llama(tmp_path / "other", seed=9)
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    header = {"Content-Type": "application/octet-stream"}
    answer = client.post("/update_weights_from_tensor", content=save(tensors), headers=header)
    assert answer.json()["success"], answer.text
    added = {"corpus_id": "texts", "token_chunks": [[5, 6, 7], [8]]}
    assert client.post("/add_external_corpus", json=added).json()["loaded_token_count"] == 4
    assert client.post("/add_external_corpus", json=added).status_code == 409
    pool.living["replica-1"].kill()
    engine.update_weights_from_tensor(tensors)
    answers = client.post("/generate", json=body).json()
    assert [content(each) for each in answers] == rollouts_of(engine)
    assert {each["meta_info"]["weight_version"] for each in answers} == {"1"}
    wait_until(lambda: pool.lives[-1] in pool._open, lambda: client.get("/status"))
    (corpus,) = client.get("/list_external_corpora").json()["corpora"]
    assert (corpus["corpus_id"], corpus["state"]) == ("texts", "published")
