"""A server on two ranks answers as one rank does, drains at one Ctrl-C, and ranks end together."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import save

from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.server.conftest import Live, fresh_metrics, fresh_status, post, run_server
from tests.server.policies import ok, output_ids
from tests.server.server_process import paused_request, served

RANKS = ("parallel=tensor", "parallel.size=2")
TEXTS = ["one two three four five six seven", "three four five six seven eight nine"]

Server = tuple[subprocess.Popen[str], str]


@pytest.fixture(scope="module")
def two(text_model_path: Path) -> Iterator[Server]:
    with served(text_model_path, f"server.drain_seconds={HANG_SECONDS}", *RANKS) as server:
        yield server


@pytest.fixture(scope="module")
def one(text_model_path: Path) -> Iterator[Live]:
    options = {"num_threads": 1, "max_kv_tokens": 2048, "spec_options": {"calibration_seconds": 0}}
    with run_server(text_model_path, options, {}) as live:
        yield live


def test_answers_and_weights_are_those_of_one_rank(two, one, first, second):
    sampling = {
        "max_new_tokens": 24, "ignore_eos": True, "n": 3, "top_p": 0.9, "seed": 7,
        "logit_bias": {"11": 2.0}, "repetition_penalty": 1.1, "stop_token_ids": [3],
    }  # fmt: skip
    generate = {"text": TEXTS, "sampling_params": sampling, "return_logprob": True}
    with httpx.Client(base_url=two[1], timeout=HANG_SECONDS) as client, one.client() as other:
        answers = [post(each, "/generate", **generate) for each in (client, other)]
        for ours, wanted in zip(*answers, strict=True):
            assert ours["output_ids"] == wanted["output_ids"]
            names = ("output_token_logprobs", "input_token_logprobs")
            assert all(ours["meta_info"].get(n) == wanted["meta_info"].get(n) for n in names)
        too_long = {"input_ids": [5] * 600, "sampling_params": {"max_new_tokens": 1}}
        assert client.post("/generate", json=too_long).status_code == 422
        before = fresh_metrics(client)["generated_tokens_total", ()]
        for policy in (second, first):  # buckets between pause and continue are one update
            ok(client.post("/pause_generation", json={"mode": "in_place"}))
            for half in policy.halves:
                raw = {"Content-Type": "application/octet-stream"}
                ok(client.post("/update_weights_from_tensor", content=save(half), headers=raw))
            ok(client.post("/continue_generation", json={}))
            digest = ok(client.post("/weights_checker", json={}))["per_engine_checksum"]
            assert digest == policy.digest
            assert output_ids(client) == policy.output_ids
        assert fresh_metrics(client)["generated_tokens_total", ()] == before + 24
        ok(client.post("/sleep"))
        assert "released" in fresh_status(client)["engine"]["unavailable_reason"]
        ok(client.post("/wake_up"))
        assert output_ids(client) == first.output_ids
        info = client.get("/get_server_info").json()
        assert (info["tp_size"], info["dp_size"]) == (2, 1)
        assert client.get("/get_world_size").json() == {"world_size": 2}


def test_one_ctrl_c_lets_what_runs_finish(two):
    """A terminal sends it to its whole foreground group. The last test of this server."""
    process, url = two
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    with paused_request(url) as (client, last):
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: client.get("/health").status_code != 200)
        assert client.post("/continue_generation", json={}).status_code == 200
        reason = last.result(HANG_SECONDS)["meta_info"]["finish_reason"]
    assert reason == {"type": "length", "length": 500}
    assert process.wait(HANG_SECONDS) == 0
    log = process.stdout.read()
    assert "stopping: 1 requests" in log
    assert "Traceback" not in log
    assert not any(rank.is_running() for rank in ranks)
