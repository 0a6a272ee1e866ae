"""Trainers that speak vLLM's dialect bring weights by its calls.

TRL's client is its own. vLLM is not installed here, and its communicator needs CUDA: tensors go
over a group of torch.distributed with gloo, joined as vLLM's senders join them. The calls of vLLM's
senders, SkyRL and prime-rl are spelled out in the order of one training step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import SamplingParams
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.torch_trainer import TorchTrainer, joined_trainer
from tests.server.conftest import Live, run_server
from tests.server.policies import PROMPT, SAMPLING, SEED, Policy, announced, output_ids

JOIN = "/init_weight_transfer_engine"
UPDATE = "/update_weights"
RPC = "/collective_rpc"


@pytest.fixture(scope="module")
def policies(first: Policy, second: Policy) -> tuple[Policy, Policy]:
    """The policies of two training steps; the server begins with the second."""
    return second, first


@pytest.fixture(scope="module")
def client(weights_live: Live) -> Iterator[httpx.Client]:
    with weights_live.client() as client:
        yield client


def post(client: httpx.Client, path: str, body: Any = None, status: int = 200, **query: Any) -> Any:
    answer = client.post(path, json=body, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def version(client: httpx.Client) -> str:
    return client.get("/get_weight_version").json()["weight_version"]


def update_info(tensors: Mapping[str, torch.Tensor], **fields: Any) -> dict[str, Any]:
    fields |= announced(tensors)
    return {"update_info": fields | {"dtype_names": fields.pop("dtypes")}}


def packed(tensors: Iterable[torch.Tensor], num_bytes: int = 2**30) -> list[torch.Tensor]:
    """The buffers that vLLM's senders make: a tensor that takes one beyond the size closes it."""
    parts: list[list[torch.Tensor]] = [[]]
    for tensor in tensors:
        parts[-1].append(tensor.contiguous().view(torch.uint8).flatten())
        if sum(part.numel() for part in parts[-1]) > num_bytes:
            parts.append([])
    return [torch.cat(part) for part in parts if part]


@contextmanager
def joined(client: httpx.Client, **options: Any) -> Iterator[TorchTrainer]:
    """The trainer's end of a group that the server has joined."""
    world_size = client.get("/get_world_size").json()["world_size"] + 1

    def join(address: dict[str, Any]) -> None:
        post(client, JOIN, {"init_info": address | options})

    with joined_trainer(join, "weight_update_group", world_size) as trainer:
        yield trainer


def test_trl(weights_live, client, policies, offline, monkeypatch):
    found = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.setattr(found, "is_vllm_available", lambda: True)

    def send(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        assert trainer_args.packed
        trainer_args.group.send(packed(tensor for _, tensor in iterator))

    sender = SimpleNamespace(trainer_send_weights=send)
    monkeypatch.setattr(found, "NCCLWeightTransferEngine", sender, raising=False)
    monkeypatch.setattr(found, "NCCLTrainerSendWeightsArgs", SimpleNamespace, raising=False)
    theirs = found.VLLMClient(base_url=weights_live.url)
    with pytest.raises(RuntimeError, match="no weight-transfer engine"):
        theirs.init_communicator(device="cpu")  # it would wait for a communicator of CUDA
    info = theirs.get_server_info()
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"

    prompts = [[7, 8], [9, 10, 11]]
    sampling = {"n": 2, "temperature": 0.9}
    options = {"generation_kwargs": {"seed": 3}}
    answer = theirs.generate(prompts, max_tokens=12, logprobs=0, **sampling, **options)
    expected = offline.generate(prompts, SamplingParams(**sampling, max_new_tokens=12, seed=3))
    assert answer["prompt_ids"] == prompts
    assert answer["completion_ids"] == [rollout.token_ids for rollout in expected]
    assert answer["logprob_token_ids"] == [[[t] for t in rollout.token_ids] for rollout in expected]
    assert answer["logprobs"] == [[[lp] for lp in rollout.logprobs] for rollout in expected]
    temperature = SAMPLING["temperature"]
    with joined(client) as theirs.communicator:
        for weights in policies:
            tensors = list(weights.tensors.items())
            middle = len(tensors) // 2
            with theirs.weight_update():
                for part in (tensors[:middle], tensors[middle:]):
                    theirs.update_named_params(metadata(part), iter(part))
            theirs.reset_prefix_cache()
            answer = theirs.generate(
                [PROMPT], temperature=temperature, max_tokens=SAMPLING["max_new_tokens"],
                generation_kwargs={"seed": SEED, "ignore_eos": True},
            )  # fmt: skip
            assert answer["completion_ids"] == [weights.output_ids]
        theirs.update_named_params(metadata(tensors), iter(tensors))  # all at once
        theirs.communicator = None


def metadata(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, str, list[int]]]:
    return [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in tensors
    ]


NO_NAMES: dict[str, Any] = {"update_info": {"names": [], "dtype_names": [], "shapes": []}}
"""vLLM's senders say what they send once."""


def call_workers(client: httpx.Client, method: str, **kwargs: Any) -> None:
    assert post(client, RPC, {"method": method, "kwargs": kwargs}) == {"results": [None]}


def test_skyrl(client, policies):
    """Its memory is the trainer's meanwhile; buffers have the size that it computes."""
    with joined(client, packed=True, packed_buffer_size_bytes=10_000) as trainer:
        body = update_info(policies[0].tensors)
        for weights in policies:
            post(client, "/pause", mode="keep", clear_cache="false")
            call_workers(client, "skyrl_sleep_for_weight_sync", offload_kv=False)
            call_workers(client, "skyrl_wake_for_weight_sync", tags=["weights"])
            post(client, "/start_weight_update")
            buffers = packed(weights.tensors.values(), 10_000)
            assert len(buffers) > 1
            sent = dict(zip(map(str, range(len(buffers))), buffers, strict=True))
            trainer.send_during(partial(post, client, UPDATE, body), sent)
            post(client, "/finish_weight_update")
            call_workers(client, "skyrl_wake_for_weight_sync", tags=["kv_cache"])
            post(client, "/reset_prefix_cache", {"reset_running_requests": False})
            post(client, "/resume")
            assert output_ids(client) == weights.output_ids
            body = NO_NAMES
    call_workers(client, "skyrl_discard_in_memory_lora", lora_name="none")


def test_skyrls_deltas(client, policies, weights_root):
    pytest.importorskip("zstandard")
    pytest.importorskip("xxhash")
    from tests.helpers.delta_publisher import publish

    new, old = policies
    source = weights_root / "deltas"
    fetch = {"target_version": 1, "sync_dir": str(source), "uri": str(source / "delta-00000001")}
    refused = client.post("/fetch_weights", json=fetch)
    assert refused.json()["error"]["param"] == "init_info.local_checkpoint_dir"
    info = {
        "base_model_path": "hub/model", "local_checkpoint_dir": str(weights_root / "followed"),
        "cloud_download_workers": 4, "checkpoint_load_format": "vllm_multi_thread_safetensors",
        "multi_thread_safetensors_max_workers": 8,
    }  # fmt: skip
    post(client, JOIN, {"init_info": info})
    for number, (before, after) in enumerate([(old, new), (new, old)], start=1):
        publish(source, number, before.tensors, after.tensors)
        fetch |= {"target_version": number, "uri": str(source / f"delta-{number:08d}")}
        body = {"update_info": fetch | {"version": number}}
        refused = client.post(UPDATE, json=body)
        assert refused.json()["error"]["param"] == "update_info.target_version"
        post(client, "/fetch_weights", fetch)
        assert output_ids(client) == before.output_ids
        post(client, "/pause", mode="keep", clear_cache="false")
        post(client, "/start_weight_update")
        post(client, UPDATE, body)
        post(client, "/finish_weight_update")
        post(client, "/resume")
        assert output_ids(client) == after.output_ids


def test_a_session_for_the_draft(text_model_path, policies, tmp_path):
    """It brings the draft alone; each model's names are said once."""
    draft = save_tiny_eagle3(tmp_path, text_model_path)
    options = {"spec": "eagle", "spec_options": {"draft_path": str(draft)}}

    def read(engine: Any) -> dict[str, torch.Tensor]:
        found = engine.worker.weights.parts["draft"].weight_loaders()
        return {name: each.read() for name, each in found.items() if each.required}

    with run_server(text_model_path, options, {}) as live, live.client() as client:
        draft = live.serving.loop.call(read).result()
        with joined(client) as trainer:
            for weights, said in zip(
                policies, (update_info, lambda tensors: NO_NAMES), strict=True
            ):
                new = {name: 2 * tensor for name, tensor in draft.items()}
                for start, sent in (("", weights.tensors), ("draft_", new)):
                    found = live.serving.loop.call(read).result()
                    assert all(torch.equal(found[name], tensor) for name, tensor in draft.items())
                    post(client, f"/start_{start}weight_update")
                    refused = client.post("/start_draft_weight_update")
                    assert "under way" in refused.json()["error"]["message"]
                    trainer.send_during(partial(post, client, UPDATE, said(sent)), sent)
                    post(client, "/finish_weight_update")
                    assert output_ids(client) == weights.output_ids
                draft = new
        found = live.serving.loop.call(read).result()
        assert all(torch.equal(found[name], tensor) for name, tensor in draft.items())


def send_sparse(client, trainer, old, new) -> httpx.Response:
    """One call of vLLM's sparse sender: of each tensor the places that changed, then the values."""
    info = update_info(new)["update_info"]
    places = [(new[name] != old[name]).flatten().nonzero().flatten().int() for name in new]
    info["num_updates_list"] = [len(each) for each in places]
    parts = {}
    for name, indices in zip(new, places, strict=True):
        parts |= {f"{name} places": indices, f"{name} values": new[name].flatten()[indices]}
    answers = []
    body = {"update_info": info}
    trainer.send_during(lambda: answers.append(client.post(UPDATE, json=body)), parts)
    return answers[0]


def test_sparse_updates(client, policies):
    new, old = policies
    with joined(client, packed=True) as trainer:  # sparse updates are not packed all the same
        post(client, "/start_weight_update")
        for last in (False, True):
            answer = send_sparse(client, trainer, old.tensors, new.half(last=last))
            assert answer.status_code == 200, answer.text
        post(client, "/finish_weight_update", {"weight_version": "94"})
        assert version(client) == "94"
        assert output_ids(client) == new.output_ids
        assert send_sparse(client, trainer, new.tensors, old.tensors).status_code == 200
        assert output_ids(client) == old.output_ids
        body = update_info(old.tensors, packed=False)
        post(client, "/start_weight_update")
        trainer.send_during(lambda: post(client, UPDATE, body), old.tensors)
        post(client, "/finish_weight_update", {"weight_version": "120"})
        post(client, "/shutdown_weight_transfer_engine")
        assert client.post(UPDATE, json=body).status_code == 400
    assert output_ids(client) == old.output_ids


def test_prime_rl_with_an_adapter(client, policies, weights_root):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(policies[1].folder, dtype=torch.float32)
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(weights_root / "adapter")
    load = {"lora_name": "policy", "lora_path": (weights_root / "adapter").as_posix()}
    asked = {"prompt": PROMPT, "max_tokens": 1}

    def is_named(expected: bool) -> bool:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        answer = client.post("/v1/completions", json=asked | {"model": "policy"})
        return (names[1:], answer.status_code) == ((["policy"], 200) if expected else ([], 404))

    for _ in range(2):  # each step of training, under one name
        post(client, "/load_lora_adapter", load)
        adapted = output_ids(client)
        assert adapted != policies[1].output_ids
        assert is_named(True)
    post(client, "/v1/unload_lora_adapter", {"lora_name": "policy"})
    assert output_ids(client) == policies[1].output_ids
    assert is_named(False)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    peft.get_peft_model(model.unload(), config).save_pretrained(weights_root / "adapter")
    refused = client.post("/load_lora_adapter", json=load)
    assert refused.status_code == 400
    assert "replaces lm_head.weight of the base" in refused.text


def test_a_refused_call_is_named_and_commits_nothing(client, policies):
    before = output_ids(client)
    pickled = update_info({}, ipc_handles_pickled="gASVAAAA")
    counted = update_info(policies[1].tensors, num_updates_list=[1])
    place = {"rank_offset": 1, "world_size": 2, "packed_buffer_size_bytes": 2**31}
    init = {"master_address": "127.0.0.1", "master_port": 1} | place
    for path, body, named in (
        (JOIN, {"init_info": init}, "init_info.backend"),
        (JOIN, {"init_info": {"nccl_unique_id_b64": "AA==", **place}}, "nccl_unique_id_b64"),
        (JOIN, {"init_info": {"backend": "gloo", **place}}, "init_info.master_address"),
        (UPDATE, pickled, "update_info.ipc_handles_pickled"),
        (UPDATE, counted, "update_info.num_updates_list"),
        (RPC, {"method": "save_model"}, "method"),
        (RPC, {"method": "skyrl_set_lora_receive_target"}, "lora.sync_mode=disk"),
        (RPC, {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"x": 1}}, "kwargs.x"),
        ("/start_draft_weight_update", {}, "selector"),  # there is no draft
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/finish_weight_update", {}, ""),  # none is open
        (UPDATE, {"weight_dir": "/etc"}, "weight_dir"),
        (UPDATE, update_info({}, group_name="nobody"), "group_name"),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code in (400, 422), (path, body)
        assert named in answer.json()["error"]["message"], (path, body)
    with joined(client) as trainer:
        post(client, "/start_weight_update")
        assert client.post("/start_weight_update").status_code == 400
        some = policies[0].half(last=False)
        body = update_info(some)
        trainer.send_during(lambda: post(client, UPDATE, body), some)
        refused = client.post("/finish_weight_update")
        assert refused.status_code == 400
        assert "torn" in refused.json()["state"]
        post(client, UPDATE, {"weight_dir": str(policies[1].folder)})
    assert output_ids(client) == before
