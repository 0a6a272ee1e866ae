"""Too much: of bytes, of tokens, of samples, of requests; and clients that leave."""

from __future__ import annotations

import json
import socket
import threading
from itertools import product

import pytest

from rollout.errors import EngineStateError
from rollout.server.http_protocol import HttpProtocol
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.held_engine import held
from tests.helpers.http_raw import open_request, read_status

LONG = {"temperature": 0.9, "max_new_tokens": 500, "ignore_eos": True}


def pause(live):
    live.serving.loop.call(lambda engine: engine.pause_generation("in_place")).result(HANG_SECONDS)


def go_on(live):
    live.serving.loop.call(lambda engine: engine.continue_generation()).result(HANG_SECONDS)


def test_bodies_are_cut_off_at_the_limit(open_server):
    live = open_server(max_body_bytes=10_000)
    headers = {"Content-Type": "application/json"}
    with live.client() as client:
        announced = client.post("/generate", content=b"x" * 10_001, headers=headers)
        assert announced.status_code == 413
        assert announced.json()["error"]["type"] == "too_large_error"
        fits = client.post("/generate", content=b"x" * 10_000, headers=headers)
        assert fits.status_code == 400  # no JSON
    # Chunked: no length is announced, and most of the body is never sent.
    with open_request(
        live.url, "POST", "/generate", {**headers, "Transfer-Encoding": "chunked"}
    ) as sent:
        for _ in range(11):
            sent.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert read_status(sent) == 413


def test_prompts_and_batches_have_limits(open_server):
    live = open_server(max_prompt_len=8, max_batch=4, max_queue=8)
    with live.client() as client:
        for prompt, sampling, param in (
            ([5] * 8, {}, None),
            ([5] * 9, {}, "len(prompt)"),
            ([5] * 9, {"max_new_tokens": 0}, "len(prompt)"),  # scored, not generated
            ([[5]] * 4, {}, None),
            ([[5]] * 5, {}, "batch"),
            ([[5]] * 2, {"n": 3}, "batch"),
        ):
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1} | sampling}
            answer = client.post("/generate", json=body)
            if param is None:
                assert answer.status_code == 200
            else:
                assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)


def test_a_full_queue_is_429_and_takes_all_of_a_call_or_none(open_server):
    live = open_server(max_batch=3, max_queue=4)
    pause(live)
    with live.client() as client:
        three = {"input_ids": [[5]] * 3, "sampling_params": {"max_new_tokens": 2}}
        calls = {"/generate": three, "/v1/completions": {"prompt": [5], "n": 3, "max_tokens": 2}}
        waiting = threading.Thread(target=client.post, args=("/generate",), kwargs={"json": three})
        waiting.start()
        wait_until(lambda: live.serving.num_unfinished == 3)
        with live.client() as other:
            for path, stream in product(calls, (False, True)):
                full = other.post(path, json={**calls[path], "stream": stream})
                assert full.status_code == 429
                assert full.headers["Retry-After"] == "1"
                assert "max_queue" in full.json()["error"]["message"]
            assert live.serving.num_unfinished == 3
            assert other.get("/health").status_code == 200
        go_on(live)
        waiting.join(HANG_SECONDS)


GENERATE = ("/generate", {"input_ids": [[5, 6], [7, 8]], "sampling_params": LONG})
COMPLETE = ("/v1/completions", {"prompt": [5, 6], "n": 2, "max_tokens": 500, "ignore_eos": True})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("call", "paused"), [(GENERATE, False), (GENERATE, True), (COMPLETE, False)]
)
def test_a_client_that_leaves_frees_its_requests(live, call, stream, paused):
    """Before its first token, or in the middle of its answer."""
    if paused:
        pause(live)
    path, asked = call
    body = json.dumps(asked | {"stream": stream}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    before = live.serving.loop.call(lambda engine: engine.metrics().finished).result(HANG_SECONDS)
    with held(live.serving.loop):
        with open_request(live.url, "POST", path, headers) as sent:
            sent.sendall(body)
            wait_until(lambda: live.serving.loop.num_unfinished == 2)
            if stream and not paused:
                assert sent.recv(1000).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: not live.serving.loop.num_unfinished)  # although it may be paused
    if paused:
        go_on(live)
    live.wait_until_idle()
    after = live.serving.loop.call(lambda engine: engine.metrics().finished).result(HANG_SECONDS)
    assert after == before  # none ran to its end


def test_a_broken_engine_is_503_with_its_reason(open_server, caplog):
    live = open_server(breaks=True)

    def breaks(batch):
        raise OSError("the machine is on fire")

    def sabotage(engine):
        engine.worker.step = breaks

    live.serving.loop.call(sabotage).result(HANG_SECONDS)
    with live.client() as client:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
        for stream in (False, False, True):
            failed = client.post("/generate", json=body | {"stream": stream})
            assert failed.status_code == 503
            assert "the machine is on fire" in failed.json()["error"]["message"]
        for path in ("/health", "/health_generate", "/v1/loads", "/get_weight_version"):
            assert client.get(path).status_code == 503
    with pytest.raises(EngineStateError):
        live.serving.loop.require_open()
    errors = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert sum("the machine is on fire" in error for error in errors) == 1


def test_too_many_connections_are_refused_and_those_there_are_go_on(open_server, monkeypatch):
    monkeypatch.setattr(HttpProtocol, "seconds", HANG_SECONDS)
    monkeypatch.setattr(HttpProtocol, "refused_seconds", HANG_SECONDS)
    live = open_server(max_connections=2)
    host, port = live.url.removeprefix("http://").split(":")
    with live.client() as client:
        assert client.get("/health").status_code == 200
        with socket.create_connection((host, int(port))) as idle:  # has said nothing yet
            with live.client() as third:
                refused = third.get("/health")
            assert (refused.status_code, refused.headers["Connection"]) == (503, "close")
            assert "max_connections" in refused.json()["error"]["message"]
            assert int(refused.headers["Retry-After"]) > 0
            asked = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
            assert client.post("/generate", json=asked).status_code == 200
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert read_status(idle) == 200

        def answers() -> bool:
            with live.client() as another:
                return another.get("/health").status_code == 200

        wait_until(answers)  # when the server has noticed that one has left
