"""A server on two ranks: every call as with one, one Ctrl-C drains, and ranks end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save

from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.forked import forked, run_module
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.ports import free_port
from tests.helpers.torch_trainer import joined_trainer
from tests.server.conftest import Live, run_server
from tests.server.fresh_status import fresh_metrics, fresh_status
from tests.server.policies import PROMPT, announced, ok, output_ids
from tests.server.server_process import SMALL, paused_request, served

RANKS = ("parallel=tensor", "parallel.size=2", "parallel.check=true")
UPDATE = "/update_weights_from_tensor"
RAW = {"Content-Type": "application/octet-stream"}
TEXTS = ["one two three four five six seven", "three four five six seven eight nine"]

Server = tuple[subprocess.Popen[str], str]


@pytest.fixture(scope="module")
def two(text_model_path: Path) -> Iterator[Server]:
    with served(text_model_path, f"server.drain_seconds={HANG_SECONDS}", *RANKS) as server:
        yield server


@pytest.fixture
def client(two: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=two[1], timeout=HANG_SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def one(text_model_path: Path) -> Iterator[Live]:
    options = {"num_threads": 1, "max_kv_tokens": 2048, "spec_options": {"calibration_seconds": 0}}
    with run_server(text_model_path, options, {}) as live:
        yield live


def digest(client: httpx.Client) -> str:
    return ok(client.post("/weights_checker", json={}))["per_engine_checksum"]


def test_rollouts_are_those_of_one_rank(client, one):
    sampling = {
        "max_new_tokens": 24, "ignore_eos": True, "n": 3, "top_p": 0.9, "seed": 7,
        "logit_bias": {"11": 2.0}, "repetition_penalty": 1.1, "stop_token_ids": [3],
    }  # fmt: skip
    generate = {"text": TEXTS, "sampling_params": sampling, "return_logprob": True}
    greedy = generate | {"sampling_params": {"max_new_tokens": 40, "temperature": 0}}
    scored = {
        "input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    for body in (generate, greedy, scored):
        found = []
        for each in (client, one.client()):
            answers = each.post("/generate", json=body).json()
            answers = answers if isinstance(answers, list) else [answers]
            found.append([
                (
                    answer["output_ids"],
                    answer["meta_info"].get("output_token_logprobs"),
                    answer["meta_info"].get("input_token_logprobs"),
                )
                for answer in answers
            ])  # fmt: skip
        assert found[0] == found[1]
        assert found[0][0][1] or found[0][0][2]
    chat = {
        "model": client.get("/v1/models").json()["data"][0]["id"],
        "messages": [{"role": "user", "content": TEXTS[0]}],
        "max_tokens": 16, "seed": 3, "logprobs": True,
    }  # fmt: skip
    ours, wanted = (each.post("/v1/chat/completions", json=chat) for each in (client, one.client()))
    assert ours.status_code == 200
    assert ours.json()["choices"] == wanted.json()["choices"]


def test_bad_input_is_refused_and_costs_no_rank(client):
    too_long = {"input_ids": [5] * 600, "sampling_params": {"max_new_tokens": 1}}
    assert client.post("/generate", json=too_long).status_code == 422
    unknown = {"input_ids": [5], "sampling_params": {"logit_bias": {"9999": 1.0}}}
    assert client.post("/generate", json=unknown).status_code == 422
    odd = {"handles": [{"SamplingParams": {"nonsense": 1}}]}
    assert "handles[0].kind" in client.post("/update_weights_from_ipc", json=odd).text
    assert client.post("/get_weights_by_name", json={"name": "nothing"}).status_code == 422
    assert client.get("/health_generate").status_code == 200


def test_what_it_says_of_itself_is_counted_once(client):
    before = fresh_metrics(client)["generated_tokens_total", ()]
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
    assert client.post("/generate", json=body).status_code == 200
    assert fresh_metrics(client)["generated_tokens_total", ()] == before + 20
    info = client.get("/get_server_info").json()
    assert (info["tp_size"], info["dp_size"]) == (2, 1)
    assert fresh_status(client)["engine"]["running"] == 0
    assert client.get("/").status_code == client.get("/health").status_code == 200


def test_weights_come_to_all_ranks_by_every_way(client, first, second):
    answer = ok(client.post(UPDATE, content=second.safetensors, headers=RAW))
    assert answer["message"] == "the weights are version 1"
    assert digest(client) == second.digest
    assert output_ids(client) == second.output_ids
    ok(client.post("/update_weights_from_disk", json={"model_path": str(first.folder)}))
    assert digest(client) == first.digest
    with SharedMemorySender(1 << 20, num_segments=4) as sender:
        handles = list(sender.handles(second.tensors.items()))
        ok(client.post("/update_weights_from_ipc", json={"handles": handles}))
    assert digest(client) == second.digest
    manifest = {
        name: {"dtype": "float32", "shape": list(tensor.shape)}
        for name, tensor in first.tensors.items()
    }
    ok(client.post("/begin_weight_update", json={"manifest": manifest, "weight_version": 40}))
    for last in (True, False):
        ok(client.post(UPDATE, content=save(first.half(last=last)), headers=RAW))
    assert ok(client.post("/end_weight_update"))["message"] == "the weights are version 40"
    ok(client.post("/pause_generation", json={"mode": "in_place"}))
    for last in (True, False):  # buckets between pause and continue are one update
        ok(client.post(UPDATE, content=save(second.half(last=last)), headers=RAW))
    ok(client.post("/continue_generation", json={}))
    assert digest(client) == second.digest
    assert output_ids(client) == second.output_ids


def test_weights_that_one_rank_would_refuse_are_refused_on_all(client, first, second):
    ok(client.post(UPDATE, content=first.safetensors, headers=RAW))
    wrong_name = {**second.tensors, "nothing.of.that.name": torch.zeros(3)}
    name = max(second.tensors)
    no_number = {**second.tensors, name: torch.full_like(second.tensors[name], torch.nan)}
    for tensors in (wrong_name, no_number, {**second.tensors, "": torch.zeros(0)}):
        answer = client.post(
            UPDATE, content=save(tensors), headers=RAW, params={"check_finite": "true"}
        )
        assert answer.status_code == 400
        assert answer.json()["state"] == ""
    assert digest(client) == first.digest
    ok(client.post("/begin_weight_update", json={}))
    ok(client.post(UPDATE, content=save(second.half(last=True)), headers=RAW))
    torn = client.post("/end_weight_update")
    assert "torn" in torn.json()["state"]
    ok(client.post(UPDATE, content=first.safetensors, headers=RAW))
    assert output_ids(client) == first.output_ids


def test_a_paused_server_waits_and_a_sleeping_one_wakes(client, first):
    ok(client.post(UPDATE, content=first.safetensors, headers=RAW))
    with ThreadPoolExecutor(1) as threads:
        ok(client.post("/pause_generation", json={"mode": "retract"}))
        waiting = threads.submit(output_ids, client)
        wait_until(lambda: client.get("/v1/loads").json()["loads"][0]["num_total_reqs"])
        ok(client.post("/continue_generation", json={}))
        assert waiting.result(HANG_SECONDS) == first.output_ids
    tags = {"tags": ["kv_cache", "weights"]}
    assert ok(client.post("/release_memory_occupation", json=tags))["freed_bytes"]["weights"] > 0
    assert "released" in fresh_status(client)["engine"]["unavailable_reason"]
    ok(client.post("/resume_memory_occupation", json=tags))
    assert output_ids(client) == first.output_ids
    ok(client.post("/flush_cache"))
    assert output_ids(client) == first.output_ids


def test_vllms_calls_reach_all_ranks(client, first, second):
    world_size = client.get("/get_world_size").json()["world_size"]
    assert world_size == 2

    def join(address: dict[str, Any]) -> None:
        info = address | {"packed": True}
        ok(client.post("/init_weight_transfer_engine", json={"init_info": info}))

    with joined_trainer(join, "weight_update_group", world_size + 1) as trainer:
        ok(client.post("/pause", params={"mode": "keep"}))
        ok(client.post("/start_weight_update", json={}))
        fields = announced(second.tensors)
        update_info = fields | {"dtype_names": fields.pop("dtypes")}
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in second.tensors.values()]
        trainer.send_during(
            lambda: ok(client.post("/update_weights", json={"update_info": update_info})),
            {"packed": torch.cat(flat)},
        )
        ok(client.post("/finish_weight_update"))
        ok(client.post("/resume"))
    assert digest(client) == second.digest
    assert output_ids(client) == second.output_ids
    ok(client.post("/sleep", params={"level": 2}))
    ok(client.post("/wake_up", params={"tags": ["weights"]}))
    ok(client.post("/update_weights", json={"weight_dir": str(first.folder)}))
    ok(client.post("/wake_up"))
    assert digest(client) == first.digest
    assert output_ids(client) == first.output_ids


def test_corpora_are_loaded_by_all_ranks_or_by_none(client, first):
    ok(client.post(UPDATE, content=first.safetensors, headers=RAW))
    texts = {"corpus_id": "texts", "documents": TEXTS}
    assert ok(client.post("/add_external_corpus", json=texts))["loaded_token_count"] == 14
    assert client.post("/add_external_corpus", json=texts).status_code == 409
    broken = {"corpus_id": "broken", "token_chunks": [[1, 10_000]]}
    assert client.post("/add_external_corpus", json=broken).status_code in (400, 422)
    counts = ok(client.get("/list_external_corpora"))["corpus_token_counts"]
    assert counts == {"texts": 14}
    assert output_ids(client) == first.output_ids
    ok(client.post("/remove_external_corpus", json={"corpus_id": "texts"}))


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


def test_a_killed_rank_ends_all(text_model_path):
    with served(text_model_path, "server.drain_seconds=0", *RANKS) as (process, url):
        ranks = psutil.Process(process.pid).children()
        (follower,) = (each for each in ranks if each.environ()["RANK"] == "1")
        with paused_request(url) as (_, last):
            follower.kill()
            with suppress(httpx.HTTPError):  # it was ended before it could say so
                answer = last.result(HANG_SECONDS)
                assert "error" in answer or answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert process.wait(HANG_SECONDS) == 128 + signal.SIGKILL
        assert "error: rank 1 of 2 was killed by SIGKILL" in process.stdout.read()
        assert not any(rank.is_running() for rank in ranks)


def ranks_of_serve(folder: Path, *arguments: str) -> list:
    """Two ranks that no launcher looks after."""
    port = free_port()
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        forked(
            run_module, "rollout.cli", "serve", *SMALL, *RANKS, *arguments,
            log=folder / f"{rank}.log",
            environment=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip


def test_a_taken_port_is_an_error_of_rank_0_and_ends_both(text_model_path, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ranks = ranks_of_serve(tmp_path, f"model={text_model_path}", f"server.port={port}")
        for rank in ranks:
            rank.join(HANG_SECONDS)
    assert [rank.exitcode for rank in ranks] == [2, 0]
    assert f"error: server.port={port}" in (tmp_path / "0.log").read_text()
    assert (tmp_path / "1.log").read_text() == ""


def test_nothing_is_left_of_a_killed_rank_0(text_model_path, tmp_path):
    first, second = ranks_of_serve(tmp_path, f"model={text_model_path}", "server.port=0")
    log = tmp_path / "0.log"
    try:
        wait_until(lambda: not first.is_alive() or (log.exists() and "serving" in log.read_text()))
        assert first.is_alive()
        os.kill(second.pid, signal.SIGTERM)  # rank 0 alone says when to stop
        first.kill()
        second.join(HANG_SECONDS)
        assert second.exitcode == 1
        assert "rank 1 of 2: rank 0 has ended or left" in (tmp_path / "1.log").read_text()
    finally:
        first.kill()
        second.kill()
