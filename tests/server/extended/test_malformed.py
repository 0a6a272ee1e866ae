"""Requests that no client should send are refused, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from benchmarks.server_bench.crowd import Outcome, send_all
from benchmarks.server_bench.malformed import malformed
from rollout import RolloutEngine, SamplingParams
from tests.helpers.hang import HANG_SECONDS
from tests.server.conftest import run_server

COUNT = 1540


@pytest.fixture(scope="module")
def live(text_model_path):
    with run_server(text_model_path, {}, {"model_name": "m"}) as live:
        yield live


def crowd(live, count: int, seed: int) -> list[Outcome]:
    port = urlsplit(live.url).port
    return asyncio.run(send_all(port, malformed(count, seed), num_clients=24, timeout=HANG_SECONDS))


def test_malformed_requests_are_refused_and_leave_nothing(live, text_model_path):
    outcomes = crowd(live, COUNT, seed=1)
    troubles = [
        (each.trouble, each.request.kind, each.request.raw[:400], each.answer)
        for each in outcomes
        if each.trouble
    ]
    assert not troubles, (len(troubles), troubles[:5])
    refused = {each.request.kind for each in outcomes if 400 <= (each.answer.status or 0) < 500}
    kinds = {each.request.kind for each in outcomes}
    assert kinds - refused <= {  # those who left heard nothing
        "truncated_body", "truncated_head", "truncated_chunks", "gone_at_once",
    }  # fmt: skip
    for each in outcomes:
        if each.answer.status is None or each.answer.status < 400:
            continue
        if each.answer.body in (b"Invalid HTTP request received.", b""):  # of the HTTP parser
            continue
        error = json.loads(each.answer.body)["error"]
        assert error["message"], each
        assert error["code"] in (each.answer.status, "context_length_exceeded")
        assert len(each.answer.body) < 4000, each
    live.wait_until_idle()
    params = SamplingParams(temperature=0.9, max_new_tokens=12, seed=5)
    (expected,) = RolloutEngine.from_pretrained(text_model_path).generate([[6, 7, 8]], params)
    body = {"temperature": 0.9, "max_new_tokens": 12, "seed": 5}
    with live.client() as client:
        answer = client.post("/generate", json={"input_ids": [6, 7, 8], "sampling_params": body})
    assert answer.json()["output_ids"] == expected.token_ids
