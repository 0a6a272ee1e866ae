"""Pausing, sleep and caches by vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.server.conftest import Live, OpenServer
from tests.server.policies import output_ids

GENERATE = "/inference/v1/generate"


@pytest.fixture
def client(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client
        assert client.post("/wake_up").json()["success"]
        assert client.post("/resume").json()["status"] == "resumed"


@contextmanager
def requested(live: Live, max_tokens: int = 9) -> Iterator[Future[dict[str, Any]]]:
    """A request that the engine has, and its choice."""

    def run() -> dict[str, Any]:
        sampling = {"max_tokens": max_tokens, "seed": 3, "ignore_eos": True}
        with live.client() as client:
            body = {"token_ids": [5, 6], "sampling_params": sampling}
            return client.post(GENERATE, json=body).json()["choices"][0]

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run)
        wait_until(lambda: live.serving.loop.num_unfinished or running.done())
        yield running


def post(client: httpx.Client, path: str, status: int = 200, **query: Any) -> dict[str, Any]:
    answer = client.post(path, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_requests_are_kept_and_go_on_or_end(live, client):
    with requested(live) as alone:
        expected = alone.result(HANG_SECONDS)["token_ids"]
    for mode, tokens in (("keep", expected), ("abort", [])):
        assert post(client, "/pause", mode="keep")["status"] == "paused"
        assert client.get("/is_paused").json() == {"is_paused": True}
        with requested(live) as waiting:
            assert post(client, "/pause", mode=mode)["success"]
            assert mode == "abort" or not waiting.done()
            if mode == "keep":
                post(client, "/resume")
            choice = waiting.result(HANG_SECONDS)
        assert choice["token_ids"] == tokens
        assert choice["finish_reason"] == ("length" if mode == "keep" else "abort")
        post(client, "/resume")
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_requests_in_flight_are_waited_for(live, client):
    with requested(live, max_tokens=60) as running:
        post(client, "/pause", mode="wait")
        choice = running.result(HANG_SECONDS)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (60, "length")
    with requested(live) as waiting:
        assert "paused" in post(client, "/pause", 503, mode="wait")["error"]["message"]
        post(client, "/resume")
        waiting.result(HANG_SECONDS)
    post(client, "/pause", wait_for_inflight_requests=True)
    assert client.get("/is_paused").json() == {"is_paused": True}


def test_requests_that_come_while_others_are_waited_for_come_after_the_pause(live, client):
    """Else a trainer that keeps sending would never be paused, or sample from both weights."""
    with requested(live, max_tokens=300) as running, ThreadPoolExecutor(1) as threads:
        pausing = threads.submit(post, client, "/pause", mode="wait")
        wait_until(lambda: live.serving.loop.is_holding or pausing.done())
        with requested(live) as later, live.client() as other:
            pausing.result(HANG_SECONDS)
            assert len(running.result(HANG_SECONDS)["token_ids"]) == 300
            assert not later.done()
            post(other, "/resume")
            assert len(later.result(HANG_SECONDS)["token_ids"]) == 9


def test_asleep_and_awake_part_by_part(live, client):
    before = output_ids(client)
    assert post(client, "/sleep", level=1)["freed_bytes"].keys() >= {"weights", "kv_cache"}
    assert post(client, "/sleep", level=1)["freed_bytes"] == {}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    with requested(live) as waiting:
        assert "kv_cache" in post(client, "/wake_up", tags=["weights"])["state"]
        assert not waiting.done()
        assert post(client, "/wake_up", tags=["weights", "kv_cache"])["state"] == ""
        waiting.result(HANG_SECONDS)
    assert post(client, "/wake_up")["state"] == ""  # as nothing is asleep
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert output_ids(client) == before


def test_sleep_ends_requests_unless_they_are_kept(live, client):
    post(client, "/pause", mode="keep")
    with requested(live) as waiting:
        post(client, "/sleep", mode="keep", tags=["kv_cache"])
        post(client, "/wake_up")
        assert not waiting.done()
        post(client, "/resume")
        assert waiting.result(HANG_SECONDS)["finish_reason"] == "length"
    post(client, "/pause", mode="keep")
    with requested(live) as waiting:
        post(client, "/sleep")
        assert waiting.result(HANG_SECONDS)["finish_reason"] == "abort"
    assert client.get("/is_paused").json() == {"is_paused": True}
    post(client, "/resume")
    with requested(live) as waiting:
        post(client, "/sleep")  # again: nothing more is released
        assert waiting.result(HANG_SECONDS)["finish_reason"] == "abort"
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_the_prefix_cache_is_dropped(live, client):
    def cached() -> int:
        body = {"token_ids": list(range(3, 90)), "sampling_params": {"max_tokens": 1}}
        usage = client.post(GENERATE, json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert client.post("/reset_prefix_cache").json()["success"] is True
    for clear_cache, kept in (("true", False), ("false", True)):
        cached()
        post(client, "/pause", clear_cache=clear_cache)
        post(client, "/resume")
        assert (cached() > 0) is kept
    post(client, "/pause", mode="keep")
    with requested(live) as waiting:
        assert client.post("/reset_prefix_cache").json()["success"] is False
        resets = {"reset_running_requests": True}
        assert client.post("/reset_prefix_cache", json=resets).json()["success"] is True
        post(client, "/resume")
        waiting.result(HANG_SECONDS)
    assert cached() == 0


def test_what_clients_ask_of_a_server(client):
    assert client.get("/ping").status_code == 200
    assert client.get("/liveness").json() == {"status": "ok"}
    assert client.get("/version").json()["version"]
    assert client.get("/get_world_size").json() == {"world_size": 1}
    info = client.get("/server_info", params={"config_format": "json"}).json()
    assert info["tp_size"] == 1  # sglang's clients read theirs
    config = info["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["lora_config"] is None
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert isinstance(
        client.get("/server_info", params={"config_format": "text"}).json()["vllm_config"], str
    )


def test_what_is_refused(client):
    for path, query in (
        ("/pause", {"mode": "stop"}), ("/sleep", {"level": 3}), ("/sleep", {"mode": "stop"}),
        ("/wake_up", {"tag": "weights"}),
    ):  # fmt: skip
        assert client.post(path, params=query).status_code == 422, path
    assert "weights, kv_cache" in post(client, "/sleep", 400, tags=["everything"])["message"]


def test_they_need_the_admin_key(open_server: OpenServer):
    live = open_server(api_key="user-key", admin_key="admin-key")
    calls = [
        ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/sleep"),
        ("POST", "/wake_up"), ("GET", "/is_sleeping"), ("POST", "/reset_prefix_cache"),
        ("POST", "/init_weight_transfer_engine"), ("POST", "/start_weight_update"),
        ("POST", "/update_weights"), ("POST", "/finish_weight_update"), ("POST", "/collective_rpc"),
    ]  # fmt: skip
    with live.client("user-key") as user, live.client() as nobody:
        for method, path in calls:
            assert user.request(method, path).status_code == 403, path
        for path in ("/tokenizer_info", "/version", "/liveness", "/get_world_size"):
            assert user.get(path).status_code == 200, path
            assert nobody.get(path).status_code == 401, path
        assert nobody.get("/ping").status_code == 200
