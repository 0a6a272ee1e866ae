"""Pausing, aborting, sleeping and flushing by sglang's and vLLM's names, and what servers tell."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.held_engine import held
from tests.server.conftest import Live, events_of, post
from tests.server.policies import ok, output_ids

LONG = {"temperature": 0.9, "max_new_tokens": 400, "ignore_eos": True, "seed": 3}
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
SHORT = LONG | {"max_new_tokens": 9}


@pytest.fixture
def client(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client
        assert client.post("/wake_up").json()["success"]
        assert client.post("/resume").json()["status"] == "resumed"
    live.wait_until_idle()


@contextmanager
def in_flight(live: Live, sampling: Any = SHORT, **body: Any) -> Iterator[Future[Any]]:
    """The future answer of a request that the engine has."""
    asked = {"input_ids": [5, 6], "sampling_params": sampling} | body
    with live.client() as client, ThreadPoolExecutor(1) as pool:
        before = live.serving.loop.num_unfinished
        future = pool.submit(post, client, "/generate", **asked)
        wait_until(lambda: live.serving.loop.num_unfinished != before or future.done())
        yield future


def ended(future: Future[Any]) -> tuple[int, str]:
    """The tokens of an answer and the reason of its end."""
    answer = future.result(HANG_SECONDS)
    return len(answer["output_ids"]), answer["meta_info"]["finish_reason"]["type"]


def call(client: httpx.Client, path: str, status: int = 200, **query: Any) -> Any:
    answer = client.post(path, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


# sglang's calls


def test_requests_and_scores_wait_while_generation_is_paused(live, client):
    post(client, "/pause_generation", mode="in_place")
    with in_flight(live) as future, ThreadPoolExecutor(1) as pool:
        scored = {"max_new_tokens": 0}
        asked = {"sampling_params": scored, "return_logprob": True, "logprob_start_len": 1}
        scoring = pool.submit(post, client, "/generate", input_ids=[5, 6, 7], **asked)
        wait_until(lambda: live.serving.num_unfinished == 2)
        with live.client() as other:
            assert other.get("/health").status_code == 200
            refused = other.get("/health_generate")
            assert refused.status_code == 503
            assert "paused" in refused.json()["error"]["message"]
            load = other.get("/v1/loads").json()["loads"][0]
            assert load["num_total_reqs"] == load["num_waiting_reqs"] == 2
            assert other.get("/get_load").json()[0]["num_reqs"] == 2
            assert not future.done()
            assert not scoring.done()
            post(other, "/continue_generation")
        assert ended(future) == (9, "length")
        logprobs = scoring.result(HANG_SECONDS)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in logprobs] == [6, 7]
    assert client.get("/health_generate").status_code == 200


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_token(live, client, mode):
    body = {"input_ids": [5, 6], "sampling_params": LONG | {"max_new_tokens": 120}}
    whole = post(client, "/generate", **body)["output_ids"]
    with live.client() as other, ExitStack() as holding:
        holding.enter_context(held(live.serving.loop))
        with other.stream("POST", "/generate", json={**body, "stream": True}) as stream:
            events = events_of(stream)
            next(events)
            post(client, "/pause_generation", mode=mode)
            post(client, "/continue_generation")
            holding.close()
            *_, last = events
    assert last["output_ids"] == whole


def test_aborts_answer_with_what_there_is(live, client):
    asked = {"return_logprob": True}
    with held(live.serving.loop), in_flight(live, LONG, **asked) as future:
        post(client, "/pause_generation")
        tokens, reason = ended(future)
    assert (tokens < 400, reason) == (True, "abort")
    meta = future.result()["meta_info"]
    assert [t for _, t, _ in meta["output_token_logprobs"]] == future.result()["output_ids"]
    assert meta["weight_versions"][0]["start"] == 0
    post(client, "/continue_generation")
    with held(live.serving.loop), in_flight(live, LONG, input_ids=[[5, 6]] * 3) as several:
        assert post(client, "/abort_request", abort_all=True)["aborted"] <= 3
        loads = client.get("/v1/loads", params={"include": "core,disagg,queues"}).json()["loads"]
        assert loads[0]["num_total_reqs"] == 0
        types = {a["meta_info"]["finish_reason"]["type"] for a in several.result(HANG_SECONDS)}
    assert types == {"abort"}
    assert client.post("/abort_request", json={}).status_code == 422
    body = {"input_ids": [5, 6], "sampling_params": LONG, "rid": "s", "stream": True}
    with (
        live.client() as other,
        held(live.serving.loop),
        other.stream("POST", "/generate", json=body) as stream,
    ):
        events = events_of(stream)
        first = next(events)
        post(client, "/abort_request", rid="s")
        *_, last = [first, *events]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"][: len(first["output_ids"])] == first["output_ids"]


def test_abort_by_rid_ends_that_request_alone(live, client):
    post(client, "/pause_generation", mode="in_place")
    two = SHORT | {"n": 2}
    with (
        in_flight(live, LONG, rid="a") as first,
        in_flight(live, two, rid="ab", input_ids=[[5, 6], [7]]) as second,
    ):
        assert post(client, "/abort_request", rid="nobody") == {"aborted": 0}
        assert post(client, "/abort_request", rid="a") == {"aborted": 1}
        assert ended(first) == (0, "abort")
        meta = first.result()["meta_info"]
        assert meta["weight_versions"] == [
            {"version": meta["weight_version"], "start": 0, "end": 0}
        ]
        assert post(client, "/abort_request", rid="ab_1") == {"aborted": 2}
        post(client, "/continue_generation")
        metas = [answer["meta_info"] for answer in second.result(HANG_SECONDS)]
    assert [meta["id"] for meta in metas] == ["ab_0_0", "ab_0_1", "ab_1_0", "ab_1_1"]
    types = [meta["finish_reason"]["type"] for meta in metas]
    assert types == ["length", "length", "abort", "abort"]
    assert live.serving.abort("ab") == 0  # names are forgotten with what they named


def test_the_cache_is_flushed_when_idle_alone(live, client):
    assert client.get("/flush_cache").status_code == 200
    post(client, "/pause_generation", mode="in_place")
    with in_flight(live, LONG) as future:
        busy = client.get("/flush_cache", params={"timeout": 0.1})
        assert busy.status_code == 400
        assert "1 requests" in busy.json()["message"]
        abort = threading.Timer(0.1, live.serving.loop.abort_all)
        abort.start()
        assert client.post("/flush_cache", params={"timeout": 600}).status_code == 200
        future.result(HANG_SECONDS)


def test_memory_is_released_and_resumed_in_parts(client):
    before = output_ids(client)
    freed = ok(client.post(RELEASE))["freed_bytes"]
    assert freed["weights"] > 0
    assert freed["kv_cache"] > 0
    assert "kv_cache" in ok(client.post(RESUME, json={"tags": ["weights"]}))["state"]
    answer = client.post(RESUME, json={"tags": ["kv_cache", "cuda_graph"]})
    assert answer.json() == {"success": True, "message": "", "state": ""}
    ok(client.post(RESUME))  # there is nothing to resume
    unknown = client.post(RELEASE, json={"tags": ["everything"]})
    assert unknown.status_code == 400
    assert "weights, kv_cache, graphs" in unknown.json()["message"]
    ok(client.post(RELEASE, json={"tags": ["kv_cache"]}))
    assert client.post(RELEASE, json={"tags": ["kv_cache"]}).status_code == 400
    assert ok(client.post(RESUME))["state"] == ""
    assert output_ids(client) == before


# vLLM's calls


def test_a_pause_may_wait_for_requests_in_flight(live, client):
    """Requests that come meanwhile come after it: else it might never begin."""
    with in_flight(live, LONG) as running, ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(call, client, "/pause", mode="wait")
        wait_until(lambda: live.serving.loop.is_holding or pausing.done())
        with in_flight(live) as later, live.client() as other:
            pausing.result(HANG_SECONDS)
            assert ended(running) == (400, "length")
            assert not later.done()
            call(other, "/resume")
            assert ended(later) == (9, "length")
    call(client, "/pause", mode="keep")
    with in_flight(live) as waiting:
        assert "paused" in call(client, "/pause", 503, mode="wait")["error"]["message"]
        call(client, "/resume")
        waiting.result(HANG_SECONDS)
    call(client, "/pause", wait_for_inflight_requests=True)
    assert client.get("/is_paused").json() == {"is_paused": True}


def test_asleep_and_awake_part_by_part(live, client):
    before = output_ids(client)
    assert call(client, "/sleep", level=1)["freed_bytes"].keys() >= {"weights", "kv_cache"}
    assert call(client, "/sleep", level=1)["freed_bytes"] == {}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    with in_flight(live) as waiting:
        assert "kv_cache" in call(client, "/wake_up", tags=["weights"])["state"]
        assert not waiting.done()
        assert call(client, "/wake_up", tags=["weights", "kv_cache"])["state"] == ""
        waiting.result(HANG_SECONDS)
    assert call(client, "/wake_up")["state"] == ""  # nothing is asleep
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert output_ids(client) == before
    assert "weights, kv_cache" in call(client, "/sleep", 400, tags=["everything"])["message"]


def test_sleep_ends_requests_unless_they_are_kept(live, client):
    for options, end in (({"mode": "keep"}, (9, "length")), ({}, (0, "abort"))):
        call(client, "/pause", mode="keep")
        with in_flight(live) as waiting:
            call(client, "/sleep", tags=["kv_cache"], **options)
            call(client, "/wake_up")
            call(client, "/resume")
            assert ended(waiting) == end
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_the_prefix_cache_is_dropped(live, client):
    def cached() -> int:
        sampling = {"max_tokens": 1}
        body = {"token_ids": list(range(3, 90)), "sampling_params": sampling}
        usage = post(client, "/inference/v1/generate", **body)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert call(client, "/reset_prefix_cache")["success"] is True
    for clear_cache, kept in (("true", False), ("false", True)):
        cached()
        call(client, "/pause", clear_cache=clear_cache)
        call(client, "/resume")
        assert (cached() > 0) is kept


def test_what_the_server_tells_of_itself(live, client, text_model_path):
    info = client.get("/get_server_info").json()
    assert info["model_path"] == str(text_model_path)
    assert (info["context_length"], info["tp_size"]) == (512, 1)
    assert "api_key" not in info["server"]
    assert info["max_running_requests"] == info["scheduler"]["max_running"] == 8
    assert info["chunked_prefill_size"] == info["scheduler"]["chunk_len"] == 256
    model = client.get("/model_info").json()
    assert model == client.get("/get_model_info").json()
    assert model["architectures"] == ["LlamaForCausalLM"]
    assert model["weight_version"] == client.get("/get_weight_version").json()["weight_version"]
    assert client.get("/get_world_size").json() == {"world_size": 1}
    assert info["disable_radix_cache"] is False
    (state,) = info["internal_states"]
    assert state["avg_spec_accept_length"] == state["speculative"]["accept_length"]
    vllm = client.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert vllm["parallel_config"]["nnodes"] == 1


def test_load_is_watched_until_nothing_runs(live, client):
    watched = {"include_inflight": True, "inflight_limit": 100}
    post(client, "/pause_generation", mode="in_place")
    with in_flight(live, LONG, rid="a") as first, in_flight(live, LONG, rid="b") as second:
        assert client.get("/load", params=watched).json() == {"server_load": 2}
        busy = post(client, "/drain", timeout=0.1)
        assert busy == {"success": False, "remaining_requests": 2}
        assert post(client, "/abort_requests", request_ids=[]) == {"aborted": 0}
        assert post(client, "/abort_requests", request_ids=["a", "nobody"]) == {"aborted": 1}
        assert ended(first) == (0, "abort")
        assert post(client, "/abort_requests") == {"aborted": 1}
        assert ended(second) == (0, "abort")
    assert post(client, "/drain", timeout=60) == {"success": True, "remaining_requests": 0}
    assert client.get("/load").json() == {"server_load": 0}
