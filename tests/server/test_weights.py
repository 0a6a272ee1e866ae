"""Each call on weights reaches the engine once, and several calls may be one update."""

from __future__ import annotations

import base64
import gc
import io
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from rollout import SamplingParams
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.held_engine import held
from tests.helpers.torch_trainer import TorchTrainer, joined_trainer
from tests.server.conftest import Live
from tests.server.policies import Policy, announced, generate, ok, output_ids

RAW = {"Content-Type": "application/octet-stream"}
UPDATE = "/update_weights_from_tensor"
DISK = "/update_weights_from_disk"
BROADCAST = "/update_weights_from_distributed"
GROUP = {"group_name": "weights"}


@pytest.fixture
def client(weights_live: Live, first: Policy) -> Iterator[httpx.Client]:
    """A client of a server that serves the first policy."""
    with weights_live.client() as client:
        client.post("/abandon_weight_update", json={})
        ok(send(client, first.safetensors))
        ok(client.post("/continue_generation", json={}))
        yield client


def send(client: httpx.Client, content: bytes, **query: Any) -> httpx.Response:
    return client.post(UPDATE, content=content, headers=RAW, params=query)


def refused(answer: httpx.Response, *, torn: bool = False) -> str:
    """The message of a refusal, which is the same in both dialects."""
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert body["success"] is False
    assert body["message"] == body["error"]["message"]
    assert ("torn" in body["state"]) is torn
    return body["message"]


def version(client: httpx.Client) -> int:
    return int(client.get("/get_weight_version").json()["weight_version"])


def in_base64(*parts: bytes) -> dict[str, Any]:
    return {"serialized_named_tensors": [base64.b64encode(part).decode() for part in parts]}


@contextmanager
def joined(client: httpx.Client) -> Iterator[TorchTrainer]:
    """The trainer's end of a group that the server joins, and leaves in the end."""

    def join(address: dict[str, Any]) -> None:
        port = {"master_port": str(address["master_port"])}  # AReaL's is a text
        ok(client.post("/init_weights_update_group", json=address | port | GROUP))

    with joined_trainer(join) as trainer:
        yield trainer
        ok(client.post("/destroy_weights_update_group", json=GROUP))


def test_every_transport_brings_an_update(client, first, second):
    policies = {each.digest: each for each in (first, second)}

    def serves(policy: Policy) -> None:
        answer = ok(client.post("/weights_checker", json={"action": "checksum"}))
        assert policies[answer["per_engine_checksum"]] is policy
        assert output_ids(client) == policy.output_ids

    query = {"weight_version": "41", "flush_cache": "false"}
    answer = ok(send(client, second.safetensors, **query))
    assert answer["message"] == "the weights are version 41"
    assert (answer["stored"], answer["ignored"]) == ({"target": len(second.tensors)}, {})
    assert 'specrollout_worker{gauge="weights/stored/target"}' in client.get("/metrics").text
    serves(second)
    halves = [save(half) for half in first.halves]
    ok(client.post(UPDATE, json=in_base64(*halves) | {"load_format": "direct"}))
    serves(first)
    equal_ranks = in_base64(second.safetensors, second.safetensors)
    ok(client.post(UPDATE, json=equal_ranks))
    serves(second)
    ok(client.post(DISK, json={"model_path": str(first.folder)}))  # the model's own
    serves(first)
    ok(client.post(DISK, json={"model_path": "second"}))  # below the root
    serves(second)
    with SharedMemorySender(1 << 20, num_segments=4) as sender:
        handles = list(sender.handles(first.tensors.items()))
        ok(client.post("/update_weights_from_ipc", json={"handles": handles}))
    serves(first)
    with joined(client) as trainer:
        body = announced(second.tensors) | GROUP
        trainer.send_during(lambda: ok(client.post(BROADCAST, json=body)), second.tensors)
    serves(second)
    assert "is no group" in refused(client.post("/destroy_weights_update_group", json=GROUP))
    body = {"name": "model.norm.weight", "truncate_size": 3}
    assert client.post("/get_weights_by_name", json=body).json() == [1.0, 1.0, 1.0]
    name = "model.embed_tokens.weight"
    rows = client.post("/get_weights_by_name", json={"name": name, "truncate_size": 2}).json()
    assert rows == second.tensors[name][:2].tolist()


def test_a_trainer_of_refused_tensors_is_not_left_waiting(client, first):
    wrong = {"model.norm.weight": torch.ones(48), "nothing.of.that.name": torch.ones(3)}
    client.post("/pause_generation", json={})
    answers = []
    with joined(client) as trainer:
        for tensors in (wrong, first.tensors):
            body = announced(tensors) | GROUP
            trainer.send_during(
                lambda body=body: answers.append(client.post(BROADCAST, json=body)), tensors
            )
    assert "nothing.of.that.name" in refused(answers[0])
    ok(answers[1])


# Updates of several calls


def test_buckets_between_pause_and_continue_are_one_update(client, first, second):
    before = version(client)
    client.post("/pause_generation", json={"mode": "retract"})
    for last in (False, True):
        answer = send(client, save(second.half(last=last)), weight_version=77)
        assert "/continue_generation commits" in ok(answer)["message"]
        assert version(client) == before
    committed = ok(client.post("/continue_generation", json={}))
    assert committed["stored"] == {"target": len(second.tensors)}
    assert version(client) == 77
    assert output_ids(client) == second.output_ids
    client.post("/pause_generation", json={})
    ok(send(client, first.safetensors, weight_version=123))
    assert version(client) == 123  # all tensors at once are committed at once
    client.post("/continue_generation", json={})
    assert output_ids(client) == first.output_ids


def test_a_version_may_have_a_label_that_splits_and_orders_nothing(client, first, second):
    def told(**fields):
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        meta = client.post("/generate", json=body | fields).json()["meta_info"]
        metadata = client.post("/v1/completions", json={"prompt": [5]}).json()["metadata"]
        in_use = client.get("/get_weight_version").json()
        assert client.get("/get_model_info").json()["weight_version"] == in_use["weight_version"]
        (span,) = meta["weight_versions"]
        names = {each["weight_version"] for each in (meta, metadata, in_use)} | {span["version"]}
        assert names == {metadata["weight_versions"][0]["version"]}
        return names.pop()

    def number():
        return client.post("/v1/completions", json={"prompt": [5]}).json()["choices"][0][
            "weight_versions"
        ][0][0]

    def name(version):
        return client.post("/update_weight_version", json={"new_version": version})

    start = number()
    ok(send(client, second.safetensors, weight_version="disk-v2"))
    assert (told(), number()) == ("disk-v2", start + 1)
    ok(send(client, first.safetensors))
    assert (told(), number()) == ("disk-v2", start + 2)
    assert ok(name("disk-v2"))["new_version"] == "disk-v2"
    assert (told(), number()) == ("disk-v2", start + 2)
    ok(name("v3"))
    assert (told(), number()) == ("v3", start + 3)
    assert output_ids(client) == first.output_ids
    ok(name(str(start + 9)))
    assert (told(), number()) == (str(start + 9), start + 9)
    ok(send(client, second.safetensors))
    assert told() == str(start + 10)
    client.post("/pause_generation", json={"mode": "retract"})
    for last in (False, True):
        ok(send(client, save(first.half(last=last)), weight_version="in parts"))
    assert version(client) == start + 10
    ok(client.post("/continue_generation", json={}))
    assert (told(), number()) == ("in parts", start + 11)
    ok(client.post("/begin_weight_update", json={}))
    ok(send(client, second.safetensors))
    ok(name("begun"))
    ok(client.post("/end_weight_update"))
    assert (told(), number()) == ("begun", start + 12)
    ok(send(client, first.safetensors, weight_version=start + 13))
    assert told() == str(start + 13)


def test_a_trainers_check_of_its_update(client, weights_live, first, second):
    def check(action, **fields):
        return client.post("/weights_checker", json={"action": action, **fields})

    ok(send(client, second.safetensors))
    (before,) = ok(check("checksum"))["ranks"]
    assert before["checksums"].keys() == second.tensors.keys()
    assert before["parallelism_info"]["tp_size"] == 1
    ok(check("snapshot"))
    ok(check("compare"))
    assert "take one first" in refused(check("compare"))
    ok(check("snapshot", selector="target"))
    assert "the weights were reset" in ok(check("reset_tensors"))["state"]
    waiting = weights_live.serving.loop.submit([5, 6], SamplingParams(max_new_tokens=2))
    (noise,) = ok(check("checksum", skip_tensor_list=["layers"]))["ranks"]
    for name, checksum in noise["checksums"].items():
        assert checksum != before["checksums"][name]
    assert not any("layers" in name for name in noise["checksums"])
    assert "differ from the snapshot: name=" in refused(check("compare"), torn=True)
    ok(send(client, first.safetensors))
    pairs = [(name, each, second.tensors[name]) for name, each in first.tensors.items()]
    differs = [name for name, old, new in pairs if not old.equal(new)]
    message = refused(check("compare"))
    assert f"{len(differs)} of {len(first.tensors)} tensors differ" in message
    name = min(differs)
    error = (first.tensors[name] - second.tensors[name]).abs().max().item()
    assert f"name={name} max_abs_err={error:g}" in message
    ok(check("compare", skip_tensor_list=differs))
    ok(check("snapshot"))
    ok(check("reset_tensors"))
    ok(send(client, first.safetensors))
    ok(check("compare"))
    assert len(waiting.future.result(HANG_SECONDS).token_ids) == 2
    assert output_ids(client) == first.output_ids


def test_a_torn_update_lets_requests_wait_until_a_whole_one(client, weights_live, second):
    ok(client.post("/begin_weight_update", json={}))
    ok(send(client, save(second.half(last=False))))
    missing = sorted(second.half(last=True))[0]
    assert missing in refused(client.post("/end_weight_update"), torn=True)
    rest = send(client, save(second.half(last=True)), partial="true")
    assert "cannot heal" in refused(rest, torn=True)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(output_ids, client)
        wait_until(lambda: weights_live.serving.loop.num_unfinished == 1)
        assert client.get("/health").status_code == 200
        health = client.get("/health_generate")
        assert health.status_code == 503
        assert "torn" in health.json()["error"]["message"]
        assert "specrollout_can_run 0.0" in client.get("/metrics").text
        assert not waiting.done()
        ok(send(client, second.safetensors))
        assert waiting.result(HANG_SECONDS) == second.output_ids


def test_requests_in_flight_end_or_go_on(client, weights_live, second):
    def running() -> int:
        asked = weights_live.serving.loop.call(lambda engine: engine.status().running)
        return asked.result(HANG_SECONDS)

    with ThreadPoolExecutor(1) as threads:
        with held(weights_live.serving.loop):
            long = threads.submit(generate, client, max_new_tokens=480)
            wait_until(lambda: running() == 1)
            ok(send(client, second.safetensors, abort_all_requests="true"))
            assert len(long.result(HANG_SECONDS).json()["output_ids"]) < 480
            long = threads.submit(generate, client, max_new_tokens=480)
            wait_until(lambda: running() == 1)
            ok(send(client, second.safetensors))
        assert len(long.result(HANG_SECONDS).json()["output_ids"]) == 480


# Refusals


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_bytes_that_are_no_tensors_are_refused(client, first, second, tmp_path):
    """A pickle is never read."""
    trap = tmp_path / "sprung"
    file = io.BytesIO()
    torch.save({"trap": Trap(trap), **second.tensors}, file)
    for data, is_pickle in (
        (pickle.dumps(Trap(trap)), True),
        (file.getvalue(), True),
        (pickle.dumps(Trap(trap), protocol=0), False),
        (b"", False),
        (b"\x02" + bytes(7) + b"{}", False),  # a file of no tensors
        ((2**40).to_bytes(8, "little") + b'{"a"', False),
        (second.safetensors[:-9], False),
        (b"\x40" + bytes(7) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(64),
         False),
        (b"\x40" + bytes(7) + b'{"a":{"dtype":"I4","shape":[4],"data_offsets":[0,2]}}'.ljust(66),
         False),
    ):  # fmt: skip
        encoded = in_base64(data) | {"load_format": "flattened_bucket"}
        for answer in (send(client, data), client.post(UPDATE, json=encoded)):
            assert ("is a pickle" in refused(answer)) is is_pickle, data[:20]
    assert not trap.exists()
    assert output_ids(client) == first.output_ids


def test_wrong_values_change_nothing(client, first, second, weights_root, tmp_path):
    wrong = dict(second.tensors) | {"model.layers.9.mlp.up_proj.weight": torch.zeros(3)}
    name = max(second.tensors)
    no_number = second.tensors | {name: torch.full_like(second.tensors[name], torch.nan)}
    (weights_root / "link").symlink_to(tmp_path)
    manifest = {"model.norm.weight": {"dtype": "float32", "shape": [48]}}
    unequal = {"names": ["a"], "dtypes": [], "shapes": [], "group_name": "none"}
    for answer, message in (
        (send(client, save(wrong)), "model.layers.9.mlp.up_proj.weight"),
        (send(client, save(no_number), check_finite="true"), "NaN"),
        (client.post(UPDATE, json={"serialized_named_tensors": ["no base64!"]}), "base64"),
        (client.post("/begin_weight_update", json={"manifest": manifest}), "missing"),
        (client.post("/begin_weight_update", json={"selector": "nothing"}), "selector"),
        (client.post("/end_weight_update"), ""),
        (client.post(DISK, json={"model_path": "link"}), "must lead below"),
        (client.post(BROADCAST, json=unequal), "no group"),
        (client.post("/weights_checker", json={"action": "reset"}), "reset_tensors"),
        (client.post("/weights_checker", json={"action": "compare"}), "take one first"),
    ):
        assert message in refused(answer)
    assert send(client, b"", weight_version="-1").status_code == 400
    assert send(client, b"", base_version="v1").status_code == 422
    assert send(client, b"", weigth_version="1").status_code == 422
    assert output_ids(client) == first.output_ids
    ok(send(client, second.safetensors, check_finite="true"))


# Memory of received tensors


def test_received_bytes_are_freed_at_once(client, weights_live, first, second):
    gc.disable()  # no traceback may hold it until somebody collects
    try:
        for content in (pickle.dumps(second.tensors), second.safetensors[:-9], b"{}" * 99):
            assert send(client, content).status_code == 400
        encoded = in_base64(second.safetensors)["serialized_named_tensors"]
        body = {"serialized_named_tensors": [*encoded, "no base64"]}
        assert client.post(UPDATE, json=body).status_code == 400
        ok(send(client, first.safetensors))
        wait_until(lambda: not memory_files())
    finally:
        gc.enable()
    assert output_ids(client) == first.output_ids


def memory_files() -> list[str]:
    opened = Path("/proc/self/fd").iterdir()
    return [link for link in map(_target, opened) if "memfd:tensors" in link]


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:  # closed meanwhile
        return ""
