"""Weights over HTTP: all of an update or none of it, whichever way it comes, and no pickles."""

from __future__ import annotations

import base64
import gc
import io
import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from rollout.server import received_tensors as tensor_count
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.held_engine import held
from tests.helpers.http_raw import open_request
from tests.helpers.torch_trainer import TorchTrainer, joined_trainer
from tests.server.conftest import Live
from tests.server.fresh_status import scrape
from tests.server.policies import Policy, announced, generate, ok, output_ids

RAW = {"Content-Type": "application/octet-stream"}
QUERY = "/update_weights_from_tensor"


@pytest.fixture
def client(weights_live: Live, first: Policy) -> Iterator[httpx.Client]:
    """A client of a server that serves the first policy."""
    with weights_live.client() as client:
        client.post("/abandon_weight_update", json={})
        ok(client.post(QUERY, content=first.safetensors, headers=RAW))
        ok(client.post("/continue_generation", json={}))
        yield client


def refused(answer: httpx.Response, status: int = 400) -> str:
    """The message of a refusal, which is the same in both dialects."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["success"] is False
    assert body["message"] == body["error"]["message"]
    return body["message"]


def version(client: httpx.Client) -> int:
    return int(client.get("/get_weight_version").json()["weight_version"])


def in_base64(*parts: bytes) -> dict:
    return {"serialized_named_tensors": [base64.b64encode(part).decode() for part in parts]}


# Ways in


def test_raw_bytes_with_options_in_the_query(client, second):
    query = {"weight_version": "41", "flush_cache": "false"}
    answer = client.post(QUERY, content=second.safetensors, headers=RAW, params=query)
    assert ok(answer)["message"] == "the weights are version 41"
    assert output_ids(client) == second.output_ids


def test_base64_of_equal_ranks_and_of_several_files(client, first, second):
    ok(client.post(QUERY, json=in_base64(second.safetensors, second.safetensors)))
    assert output_ids(client) == second.output_ids
    halves = [save(half) for half in first.halves]
    ok(client.post(QUERY, json=in_base64(*halves) | {"load_format": "direct"}))
    assert output_ids(client) == first.output_ids


def test_a_folder_below_the_root_and_the_models_own(client, first, second):
    body = {"model_path": str(second.folder), "abort_all_requests": True}
    assert ok(client.post("/update_weights_from_disk", json=body))
    assert output_ids(client) == second.output_ids
    ok(client.post("/update_weights_from_disk", json={"model_path": "second"}))
    ok(client.post("/update_weights_from_disk", json={"model_path": str(first.folder)}))
    assert output_ids(client) == first.output_ids


def test_what_has_changed_since_a_version(client, first, second):
    """By the places that changed; a version that was missed is refused by that name."""
    old, new = first.tensors, second.tensors
    changes: dict[str, torch.Tensor] = {}
    for name, tensor in new.items():
        places = (tensor != old[name]).view(-1).nonzero().flatten()
        changes[f"{name}:elements"] = places
        changes[f"{name}:values"] = tensor.view(-1)[places]
    content, before = save(changes), version(client)
    for base in (before - 1, before + 1):
        query = {"base_version": str(base)}
        answer = client.post(QUERY, content=content, headers=RAW, params=query)
        assert f"version {before}" in refused(answer)
        assert answer.json()["error"]["param"] == "base_version"
    assert output_ids(client) == first.output_ids
    ok(client.post(QUERY, content=content, headers=RAW, params={"base_version": str(before)}))
    assert output_ids(client) == second.output_ids
    assert version(client) == before + 1


def test_shared_memory(client, second):
    with SharedMemorySender(1 << 20, num_segments=4) as sender:
        handles = list(sender.handles(second.tensors.items()))
        ok(client.post("/update_weights_from_ipc", json={"handles": handles}))
    assert output_ids(client) == second.output_ids


GROUP = {"group_name": "weights"}


@contextmanager
def joined(client: httpx.Client) -> Iterator[TorchTrainer]:
    """The trainer's end of a group that the server joins, and leaves in the end."""

    def join(address: dict[str, Any]) -> None:
        ok(client.post("/init_weights_update_group", json=address | GROUP))

    try:
        with joined_trainer(join) as trainer:
            yield trainer
    finally:
        client.post("/destroy_weights_update_group", json=GROUP)


def test_a_group_of_a_trainer_that_has_torch_alone(client, second):
    body = announced(second.tensors) | GROUP
    with joined(client) as trainer:
        trainer.send_during(
            lambda: ok(client.post("/update_weights_from_distributed", json=body)), second.tensors
        )
    assert output_ids(client) == second.output_ids
    gone = client.post("/destroy_weights_update_group", json=GROUP)
    assert "is no group" in refused(gone)


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_trainer_whose_tensors_are_refused_is_not_left_waiting(client, first, is_paused):
    wrong = {"model.norm.weight": torch.ones(48), "nothing.of.that.name": torch.ones(3)}
    if is_paused:
        client.post("/pause_generation", json={})
    with joined(client) as trainer:
        answers = []

        def update(tensors):
            body = announced(tensors) | GROUP
            answers.append(client.post("/update_weights_from_distributed", json=body))

        for tensors in (wrong, first.tensors):
            trainer.send_during(partial(update, tensors), tensors)
        refusal, fine = answers
        assert "nothing.of.that.name" in refused(refusal)
        assert "torn" not in refusal.json()["state"]
        ok(fine)
    ok(client.post("/continue_generation", json={}))
    assert output_ids(client) == first.output_ids


# Updates of several calls


def test_buckets_between_pause_and_continue_are_one_update(client, first, second):
    before = version(client)
    client.post("/pause_generation", json={"mode": "retract"})
    for last in (False, True):
        answer = client.post(
            QUERY, content=save(second.half(last=last)), headers=RAW, params={"weight_version": 77}
        )
        assert "/continue_generation commits" in ok(answer)["message"]
        assert version(client) == before
    client.post("/continue_generation", json={})
    assert version(client) == 77
    assert output_ids(client) == second.output_ids


def test_a_whole_update_while_paused_is_committed_at_once(client, second):
    client.post("/pause_generation", json={})
    query = {"weight_version": 123}
    ok(client.post(QUERY, content=second.safetensors, headers=RAW, params=query))
    assert version(client) == 123
    client.post("/continue_generation", json={})
    assert output_ids(client) == second.output_ids


def test_continuing_without_the_last_bucket(client, second):
    client.post("/pause_generation", json={})
    ok(client.post(QUERY, content=save(second.half(last=False)), headers=RAW))
    message = refused(client.post("/continue_generation", json={}))
    assert sorted(second.half(last=True))[0] in message
    for _ in range(2):  # clients try again
        assert "torn" in refused(client.post("/continue_generation", json={}))
    ok(client.post(QUERY, content=second.safetensors, headers=RAW))
    client.post("/continue_generation", json={})
    assert output_ids(client) == second.output_ids


def test_begin_and_end_with_options_that_the_first_call_brings(client, second):
    ok(client.post("/begin_weight_update", json={"selector": "all"}))
    options = {"weight_version": 50, "flush_cache": False}
    for last in (False, True):
        body = in_base64(save(second.half(last=last))) | options
        assert "/end_weight_update commits" in ok(client.post(QUERY, json=body))["message"]
    assert ok(client.post("/end_weight_update"))["message"] == "the weights are version 50"
    assert output_ids(client) == second.output_ids


def test_a_part_that_contradicts_the_update(client, first, second):
    ok(client.post("/begin_weight_update", json={"weight_version": 60}))
    halves = [save(half) for half in second.halves]
    ok(client.post(QUERY, content=halves[0], headers=RAW, params={"weight_version": 60}))
    answer = client.post(QUERY, content=halves[1], headers=RAW, params={"weight_version": 61})
    assert "are set by begin_weight_update alone" in refused(answer)
    assert "torn" in answer.json()["state"]


def test_what_is_announced_is_checked_before_anything_comes(client, first):
    manifest = {"model.norm.weight": {"dtype": "float32", "shape": [48]}}
    answer = client.post("/begin_weight_update", json={"manifest": manifest})
    assert "missing" in refused(answer)
    assert answer.json()["state"] == ""
    assert output_ids(client) == first.output_ids


# What is refused


def test_wrong_names_are_listed_and_nothing_has_changed(client, first, second):
    wrong = dict(second.tensors) | {"model.layers.9.mlp.up_proj.weight": torch.zeros(3)}
    del wrong["model.norm.weight"]
    answer = client.post(QUERY, content=save(wrong), headers=RAW)
    message = refused(answer)
    assert "model.layers.9.mlp.up_proj.weight" in message
    assert "model.norm.weight" in message
    assert answer.json()["state"] == ""
    assert output_ids(client) == first.output_ids


def test_a_value_that_is_no_number_is_found_before_anything_is_written(client, first, second):
    broken = dict(second.tensors)
    broken[max(broken)] = torch.full_like(broken[max(broken)], float("nan"))
    query = {"check_finite": "true"}
    for answer in (
        client.post(QUERY, content=save(broken), headers=RAW, params=query),
        client.post(QUERY, json=in_base64(save(broken)) | {"check_finite": True}),
    ):
        assert "NaN" in refused(answer)
        assert answer.json()["state"] == ""
    assert output_ids(client) == first.output_ids
    ok(client.post(QUERY, content=second.safetensors, headers=RAW, params=query))
    assert output_ids(client) == second.output_ids


def test_one_call_names_so_many_tensors_and_no_more(client, first, monkeypatch):
    """A million names would hold up generation for as long as they are looked at."""
    monkeypatch.setattr(tensor_count, "MAX_TENSORS", 20)
    names = [f"layer.{index}" for index in range(21)]
    entry = {"dtype": "float32", "shape": [4]}
    packed = [entry | {"name": name, "start": 0, "end": 16} for name in names]
    handle = {"kind": "shared_memory", "layout": {"num_bytes": 16, "entries": packed[:11]}}
    tensors = save({name: torch.zeros(1) for name in names})
    for answer in (
        client.post(QUERY, content=tensors, headers=RAW),
        client.post(QUERY, json=in_base64(tensors)),
        client.post("/begin_weight_update", json={"manifest": dict.fromkeys(names, entry)}),
        client.post(
            "/update_weights_from_distributed",
            json={"names": names, "dtypes": ["float32"] * 21, "shapes": [[4]] * 21},
        ),
        client.post("/update_weights_from_ipc", json={"handles": [handle, handle]}),
    ):
        assert answer.status_code in (400, 422)
        assert "at most 20 tensors" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"]
    halves = [save(half) for half in first.halves]
    ok(client.post("/begin_weight_update", json={}))
    for half in halves:
        ok(client.post(QUERY, content=half, headers=RAW))
    ok(client.post("/end_weight_update", json={}))


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "protocol 0"])
def test_a_pickle_is_refused_and_not_read(client, first, second, tmp_path, kind):
    trap = tmp_path / "sprung"
    if kind == "torch.save":
        file = io.BytesIO()
        torch.save({"trap": Trap(trap), **second.tensors}, file)
        data = file.getvalue()
    else:
        data = pickle.dumps(Trap(trap), protocol=0 if kind == "protocol 0" else None)
    for answer in (
        client.post(QUERY, content=data, headers=RAW),
        client.post(QUERY, json=in_base64(data) | {"load_format": "flattened_bucket"}),
    ):
        assert "safetensors.torch.save" in refused(answer)
        assert ("is a pickle" in answer.text) is (kind != "protocol 0")
    assert not trap.exists()
    assert output_ids(client) == first.output_ids


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x08",
        b"\x02" + bytes(7) + b"{}",  # a file of no tensors
        b"\xff" * 8 + b"{}",
        (2**40).to_bytes(8, "little") + b'{"a"',
        b"\x40" + bytes(7) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(64),
        b"\x40" + bytes(7) + b'{"a":{"dtype":"I4","shape":[4],"data_offsets":[0,2]}}'.ljust(66),
    ],
)
def test_bytes_that_are_no_tensors(client, first, data):
    for answer in (
        client.post(QUERY, content=data, headers=RAW),
        client.post(QUERY, json=in_base64(data)),
    ):
        assert refused(answer)
        assert answer.json()["state"] == ""
    assert output_ids(client) == first.output_ids


def test_bodies_that_are_not_as_they_should_be(client, weights_root):
    def post(path: str = QUERY, **what: object) -> int:
        return client.post(path, **what).status_code

    assert post(json={"serialized_named_tensors": ["no base64!"]}) == 400
    assert post(json={"serialized_named_tensors": []}) == 422
    assert post(json={"serialized_named_tensors": [1]}) == 422
    assert post(content=b"{", headers={"Content-Type": "application/json"}) == 400
    assert post(content=b"{}", headers={"Content-Type": "text/plain"}) == 415
    assert post(content=b"") == 415
    assert post(content=b"", headers=RAW, params={"weight_version": "v1"}) == 422
    assert post(content=b"", headers=RAW, params={"weigth_version": "1"}) == 422
    assert post("/update_weights_from_disk", json={"model_path": "second", "keep_pause": 1}) == 422
    assert post("/update_weights_from_disk", json={"model_path": 3}) == 422
    assert post("/update_weights_from_disk", json={"model_path": "", "load_format": "pt"}) == 400
    assert post("/update_weights_from_ipc", json={"handles": [{"kind": "file"}]}) == 400
    assert post("/update_weights_from_ipc", json={"zmq_handles": {"a": "b"}}) == 422
    body = {"names": ["a"], "dtypes": [], "shapes": [], "group_name": "none"}
    assert post("/update_weights_from_distributed", json=body) == 400
    assert post("/begin_weight_update", json={"selector": "nothing"}) == 400
    assert post("/end_weight_update") == 400
    assert post("/weights_checker", json={"action": "reset_tensors"}) == 400


def test_paths_that_lead_elsewhere(client, weights_root, second, tmp_path, first):
    (weights_root / "link").symlink_to(tmp_path)
    (weights_root / "inside").mkdir()
    (weights_root / "inside" / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(second.safetensors)
    (tmp_path / "config.json").write_text((second.folder / "config.json").read_text())
    for path in ("link", str(tmp_path), "../" + tmp_path.name, "inside", "nothing", "/etc"):
        answer = client.post("/update_weights_from_disk", json={"model_path": path})
        assert refused(answer), path
    assert output_ids(client) == first.output_ids


def test_a_damaged_folder(client, weights_root, second, first):
    (weights_root / "damaged").mkdir()
    (weights_root / "damaged" / "model.safetensors").write_bytes(second.safetensors[:-100])
    answer = client.post("/update_weights_from_disk", json={"model_path": "damaged"})
    assert "truncated or damaged" in refused(answer)
    assert output_ids(client) == first.output_ids


def test_what_came_is_given_back_at_once(client, first, second):
    gc.disable()  # no traceback may hold it until somebody collects
    try:
        for content in (pickle.dumps(second.tensors), second.safetensors[:-9], b"", b"{}" * 99):
            assert client.post(QUERY, content=content, headers=RAW).status_code == 400
        encoded = base64.b64encode(second.safetensors).decode()
        body = {"serialized_named_tensors": [encoded, "no base64"]}
        assert client.post("/update_weights_from_tensor", json=body).status_code == 400
        ok(client.post(QUERY, content=first.safetensors, headers=RAW))
        wait_until(lambda: not memory_files())
    finally:
        gc.enable()


def test_a_sender_that_leaves_in_the_middle_leaves_nothing(client, weights_live, first, second):
    wait_until(lambda: not memory_files())
    headers = RAW | {"Content-Length": "1000000"}
    with open_request(weights_live.url, "POST", QUERY, headers) as sender:
        sender.sendall(second.safetensors[:50_000])
        wait_until(memory_files)
    wait_until(lambda: not memory_files())
    assert output_ids(client) == first.output_ids


def memory_files() -> list[str]:
    opened = Path("/proc/self/fd").iterdir()
    return [link for link in map(_target, opened) if "memfd:tensors" in link]


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:  # closed meanwhile
        return ""


def test_larger_bodies_for_weights_alone(open_server, second):
    live = open_server(max_body_bytes=2000, max_weights_body_bytes=len(second.safetensors))
    with live.client() as client:
        ok(client.post(QUERY, content=second.safetensors, headers=RAW))
        assert client.post(QUERY, content=second.safetensors + b" ", headers=RAW).status_code == 413
        chunks = (second.safetensors[i : i + 10_000] for i in range(0, 10**6, 10_000))
        ok(client.post(QUERY, content=chunks, headers=RAW))
        body = {"model_path": "x" * 3000}
        assert client.post("/update_weights_from_disk", json=body).status_code == 413


# Requests in flight


def test_a_torn_update_lets_requests_wait_until_a_whole_one(client, weights_live, first, second):
    ok(client.post("/begin_weight_update", json={}))
    ok(client.post(QUERY, content=save(second.half(last=False)), headers=RAW))
    answer = client.post("/end_weight_update")
    assert sorted(second.half(last=True))[0] in refused(answer)
    assert answer.json()["state"].startswith("the weights are torn")
    partial = {"partial": "true"}
    rest = client.post(QUERY, content=save(second.half(last=True)), headers=RAW, params=partial)
    assert "cannot heal" in refused(rest)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(output_ids, client)
        wait_until(lambda: weights_live.serving.loop.num_unfinished == 1)
        assert client.get("/health").status_code == 200
        health = client.get("/health_generate")
        assert health.status_code == 503
        assert "torn" in health.json()["error"]["message"]
        assert "specrollout_can_run 0.0" in client.get("/metrics").text
        time.sleep(0.1)
        assert not waiting.done()
        ok(client.post(QUERY, content=second.safetensors, headers=RAW))
        assert waiting.result(HANG_SECONDS) == second.output_ids


def test_requests_in_flight_end_or_go_on(client, weights_live, second):
    def running() -> int:
        asked = weights_live.serving.loop.call(lambda engine: engine.status().running)
        return asked.result(HANG_SECONDS)

    with ThreadPoolExecutor(1) as threads:
        with held(weights_live.serving.loop):
            long = threads.submit(generate, client, max_new_tokens=480)
            wait_until(lambda: running() == 1)
            query = {"abort_all_requests": "true"}
            ok(client.post(QUERY, content=second.safetensors, headers=RAW, params=query))
            ended = long.result(HANG_SECONDS).json()
            assert len(ended["output_ids"]) < 480
            long = threads.submit(generate, client, max_new_tokens=480)
            wait_until(lambda: running() == 1)
            ok(client.post(QUERY, content=second.safetensors, headers=RAW))
        assert len(long.result(HANG_SECONDS).json()["output_ids"]) == 480


def test_a_slow_sender_blocks_nobody_but_the_engine(client, second):
    with joined(client) as trainer, ThreadPoolExecutor(1) as threads:
        body = announced(second.tensors) | GROUP
        update = threads.submit(
            client.post, "/update_weights_from_distributed", json=body, timeout=HANG_SECONDS
        )
        # What may not wait for the engine.
        wait_until(lambda: scrape(client)["status_age_seconds", ()] > 0.5)
        assert client.get("/health").status_code == 200
        assert not update.done()
        trainer.send(second.tensors.values())
        ok(update.result(HANG_SECONDS))
    assert output_ids(client) == second.output_ids


# Looks at them


def test_values_and_digest(client, first, second):
    body = {"name": "model.norm.weight", "truncate_size": 3}
    assert client.post("/get_weights_by_name", json=body).json() == [1.0, 1.0, 1.0]
    assert client.post("/get_weights_by_name", json={"name": "nothing"}).status_code == 422
    answer = ok(client.post("/weights_checker", json={"action": "checksum"}))
    assert answer["per_engine_checksum"] == first.digest != second.digest
