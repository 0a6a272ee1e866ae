"""Sleep and wake over HTTP, by sglang's names."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from safetensors.torch import load_file, save

from tests.helpers.hang import HANG_SECONDS
from tests.server.policies import output_ids

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


def test_requests_wait_for_the_memory_and_have_the_same_tokens(client, live):
    before = output_ids(client)
    freed = client.post(RELEASE, json={}).json()["freed_bytes"]
    assert freed["weights"] > 0
    assert freed["kv_cache"] > 0
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(output_ids, client)
        while live.serving.loop.num_unfinished < 1:
            time.sleep(0.002)
        answer = client.post(RESUME, json={"tags": ["weights"]})
        assert "kv_cache" in answer.json()["state"]
        assert not waiting.done()
        answer = client.post(RESUME, json={"tags": ["kv_cache", "cuda_graph"]})
        assert answer.json() == {"success": True, "message": "", "state": ""}
        assert waiting.result(HANG_SECONDS) == before


def test_without_a_body_it_is_all_of_it(client):
    before = output_ids(client)
    assert client.post(RELEASE).status_code == 200
    assert client.post(RESUME).json()["state"] == ""
    assert client.post(RESUME).status_code == 200  # there is nothing to resume
    assert output_ids(client) == before


def test_graphs_that_nobody_released(client):
    assert client.post(RELEASE, json={"tags": ["weights", "kv_cache"]}).status_code == 200
    tags = {"tags": ["weights", "kv_cache", "cuda_graph"]}
    assert client.post(RESUME, json=tags).json()["state"] == ""


def test_weights_that_were_not_kept(client, text_model_path):
    before = output_ids(client)
    client.post(RELEASE, json={"tags": ["weights"], "keep_weights": False})
    assert "torn" in client.post(RESUME, json={"tags": ["weights"]}).json()["state"]
    tensors = save(load_file(text_model_path / "model.safetensors"))
    raw = {"Content-Type": "application/x-safetensors"}
    answer = client.post("/update_weights_from_tensor", content=tensors, headers=raw)
    assert answer.status_code == 200
    assert output_ids(client) == before


def test_what_is_refused(client):
    answer = client.post(RELEASE, json={"tags": ["everything"]})
    assert answer.status_code == 400
    assert "weights, kv_cache, graphs" in answer.json()["message"]
    assert client.post(RESUME, json={"tags": ["weights"]}).status_code == 400
    assert client.post(RELEASE, json={"tags": "weights"}).status_code == 422
    assert client.post(RELEASE, json={"tag": ["weights"]}).status_code == 422
    assert client.get(RELEASE).status_code == 405
    client.post(RELEASE, json={"tags": ["kv_cache"]})
    assert client.post(RELEASE, json={"tags": ["kv_cache"]}).status_code == 400
    assert client.post(RESUME).json()["state"] == ""
