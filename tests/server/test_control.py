"""Pausing, aborting, flushing, and what the server tells of itself."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.held_engine import held
from tests.server.conftest import events_of, post

LONG = {"temperature": 0.9, "max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(autouse=True)
def running_again(live, client):
    yield
    client.post("/continue_generation", json={})
    live.wait_until_idle()


@contextmanager
def in_flight(live, **body):
    """A request that waits for its answer meanwhile; gives the future of its answer."""
    with live.client() as client, ThreadPoolExecutor(1) as pool:
        before = live.serving.loop.num_unfinished
        future = pool.submit(post, client, "/generate", **body)
        wait_until(lambda: live.serving.loop.num_unfinished != before or future.done())
        yield future


def test_requests_wait_while_generation_is_paused(live, client):
    post(client, "/pause_generation", mode="in_place")
    short = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    with in_flight(live, input_ids=[5, 6], sampling_params=short) as future:
        assert client.get("/health").status_code == 200
        refused = client.get("/health_generate")
        assert refused.status_code == 503
        assert "paused" in refused.json()["error"]["message"]
        assert not future.done()
        post(client, "/continue_generation")
        assert len(future.result(HANG_SECONDS)["output_ids"]) == 4
    assert client.get("/health_generate").status_code == 200


def test_scores_wait_while_generation_is_paused(live, client):
    post(client, "/pause_generation", mode="in_place")
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
    }
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(post, client, "/generate", **body)
        while not live.serving.num_unfinished:
            time.sleep(0.002)
        with live.client() as other:
            post(other, "/continue_generation")
        scored = future.result(HANG_SECONDS)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in scored] == [6, 7]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_does_not_change_what_comes(live, client, mode):
    sampling = {**LONG, "max_new_tokens": 120, "seed": 3}
    body = {"input_ids": [5, 6], "sampling_params": sampling}
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


def test_pausing_with_abort_answers_with_the_partial(live, client):
    asked = {"input_ids": [5, 6], "sampling_params": LONG, "return_logprob": True}
    with held(live.serving.loop), in_flight(live, **asked) as future:
        post(client, "/pause_generation")
        answer = future.result(HANG_SECONDS)
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) < 400
    assert [t for _, t, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["weight_version"] == "0"


def test_abort_by_rid_ends_that_request_alone(live, client):
    post(client, "/pause_generation", mode="in_place")
    short = {**LONG, "max_new_tokens": 3, "n": 2}
    with (
        in_flight(live, rid="a", input_ids=[5, 6], sampling_params=LONG) as first,
        in_flight(live, rid="ab", input_ids=[[5, 6], [7]], sampling_params=short) as second,
    ):
        assert post(client, "/abort_request", rid="nobody") == {"aborted": 0}
        assert post(client, "/abort_request", rid="a") == {"aborted": 1}
        answer = first.result(HANG_SECONDS)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"] == []
        assert post(client, "/abort_request", rid="ab_1") == {"aborted": 2}
        post(client, "/continue_generation")
        answers = second.result(HANG_SECONDS)
    assert [answer["meta_info"]["id"] for answer in answers] == [
        "ab_0_0",
        "ab_0_1",
        "ab_1_0",
        "ab_1_1",
    ]
    types = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert types == ["length", "length", "abort", "abort"]
    assert live.serving.abort("ab") == 0  # names are forgotten with what they named


def test_an_aborted_stream_ends_with_what_it_has(live, client):
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


def test_abort_all_leaves_an_idle_server(live, client):
    """A client such as slime aborts, then asks for the load until nothing is left."""
    asked = {"input_ids": [[5, 6]] * 3, "sampling_params": LONG}
    with held(live.serving.loop), in_flight(live, **asked) as future:
        assert post(client, "/abort_request", abort_all=True)["aborted"] <= 3
        loads = client.get("/v1/loads", params={"include": "core,disagg,queues"}).json()["loads"]
        assert loads[0]["num_total_reqs"] == 0
        types = {a["meta_info"]["finish_reason"]["type"] for a in future.result(HANG_SECONDS)}
    assert types == {"abort"}
    assert client.post("/abort_request", json={}).status_code == 422


def test_the_cache_is_flushed_when_idle_alone(live, client):
    assert client.get("/flush_cache").status_code == 200
    post(client, "/pause_generation", mode="in_place")
    with in_flight(live, input_ids=[5, 6], sampling_params=LONG) as future:
        busy = client.get("/flush_cache", params={"timeout": 0.1})
        assert busy.status_code == 400
        assert "1 requests" in busy.json()["message"]
        abort = threading.Timer(0.1, live.serving.loop.abort_all)
        abort.start()
        assert client.post("/flush_cache", params={"timeout": 600}).status_code == 200
        future.result(HANG_SECONDS)
    assert client.get("/flush_cache", params={"timeout": "nan"}).status_code == 422


def test_loads_count_what_runs_and_what_waits(live, client):
    post(client, "/pause_generation", mode="in_place")
    with in_flight(live, input_ids=[[5, 6]] * 3, sampling_params=LONG) as future:
        load = client.get("/v1/loads").json()["loads"][0]
        assert load["num_total_reqs"] == load["num_waiting_reqs"] == 3
        assert client.get("/get_load").json()[0]["num_reqs"] == 3
        post(client, "/abort_request", abort_all=True)
        future.result(HANG_SECONDS)


def test_what_the_server_tells_of_itself(live, client, text_model_path):
    info = client.get("/get_server_info").json()
    of_both = client.get("/server_info").json()
    del of_both["vllm_config"]
    assert info == of_both | {"internal_states": info["internal_states"]}
    assert info["model_path"] == str(text_model_path)
    assert info["context_length"] == 512
    assert "api_key" not in info["server"]
    assert info["max_running_requests"] == info["scheduler"]["max_running"] == 8
    assert info["chunked_prefill_size"] == info["scheduler"]["chunk_len"] == 256
    model = client.get("/model_info").json()
    assert model == client.get("/get_model_info").json()
    assert model["architectures"] == ["LlamaForCausalLM"]
    assert model["weight_version"] == client.get("/get_weight_version").json()["weight_version"]


def test_unknown_modes_and_paths(client):
    assert client.post("/pause_generation", json={"mode": "later"}).status_code == 422
    missing = client.get("/nowhere")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"
