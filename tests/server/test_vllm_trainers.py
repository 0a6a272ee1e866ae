"""Trainers that speak vLLM's dialect bring weights by its calls.

TRL's client is its own. vLLM is not installed here, and its communicator needs CUDA: tensors go
over a group of torch.distributed with gloo, joined as vLLM's senders join them. The calls of SkyRL
and prime-rl are spelled out in the order of one training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import SamplingParams
from tests.helpers.torch_trainer import TorchTrainer, joined_trainer
from tests.server.conftest import Live
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


def packed(tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """The one buffer that vLLM's senders make of less than a GiB."""
    return torch.cat([tensor.contiguous().view(torch.uint8).flatten() for _, tensor in tensors])


@contextmanager
def joined(client: httpx.Client) -> Iterator[TorchTrainer]:
    """The trainer's end of a group that the server has joined."""
    world_size = client.get("/get_world_size").json()["world_size"] + 1

    def join(address: dict[str, Any]) -> None:
        post(client, JOIN, {"init_info": address})

    with joined_trainer(join, "weight_update_group", world_size) as trainer:
        yield trainer


def test_trl(weights_live, client, policies, offline, monkeypatch):
    found = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.setattr(found, "is_vllm_available", lambda: True)

    def send(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        assert trainer_args.packed
        trainer_args.group.send([packed(iterator)])

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


def test_skyrl(client, policies):
    with joined(client) as trainer:
        for weights in policies:
            post(client, "/pause", mode="keep", clear_cache="false")
            options = {"is_checkpoint_format": True}
            start = {"method": "skyrl_start_weight_update", "kwargs": options}
            assert post(client, RPC, start) == {"results": [None]}
            receive = {"method": "update_weights_nccl", "kwargs": update_info(weights.tensors)}
            trainer.send_during(lambda body=receive: post(client, RPC, body), weights.tensors)
            post(client, RPC, {"method": "skyrl_finish_weight_update"})
            post(client, "/reset_prefix_cache", {"reset_running_requests": False})
            post(client, "/resume")
            assert output_ids(client) == weights.output_ids


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
    with joined(client) as trainer:
        post(client, "/start_weight_update")
        for last in (False, True):
            answer = send_sparse(client, trainer, old.tensors, new.half(last=last))
            assert answer.status_code == 200, answer.text
        post(client, "/finish_weight_update", {"weight_version": "94"})
        assert version(client) == "94"
        assert output_ids(client) == new.output_ids
        assert send_sparse(client, trainer, new.tensors, old.tensors).status_code == 200
        assert output_ids(client) == old.output_ids
        body = update_info(old.tensors)
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


def test_a_refused_call_is_named_and_commits_nothing(client, policies):
    before = output_ids(client)
    pickled = update_info({}, ipc_handles_pickled="gASVAAAA")
    counted = update_info(policies[1].tensors, num_updates_list=[1])
    init = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    for path, body, named in (
        (JOIN, {"init_info": init}, "init_info.backend"),
        (UPDATE, pickled, "update_info.ipc_handles_pickled"),
        (UPDATE, counted, "update_info.num_updates_list"),
        (RPC, {"method": "save_model"}, "method"),
        (RPC, {"method": "skyrl_start_weight_update", "kwargs": {"x": 1}}, "kwargs.x"),
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
