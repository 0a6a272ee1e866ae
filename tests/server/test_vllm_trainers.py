"""A rollout, an update and a rollout by the clients of vLLM's dialect.

TRL's clients are its own, unmodified. vLLM is not installed here, and its communicator needs CUDA:
tensors go over a group of torch.distributed with gloo, joined as vLLM's senders join them. The
calls of SkyRL and prime-rl are spelled out in the order of one training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import SamplingParams
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.torch_trainer import TorchTrainer, joined_trainer
from tests.server.conftest import Live
from tests.server.policies import PROMPT, SAMPLING, SEED, Policy, announced, output_ids

JOIN = "/init_weight_transfer_engine"
RPC = "/collective_rpc"


@pytest.fixture(scope="module")
def policies(first: Policy, second: Policy) -> tuple[Policy, Policy]:
    """Those of two training steps; the server begins with the second."""
    return second, first


@pytest.fixture(scope="module")
def client(weights_live: Live) -> Iterator[httpx.Client]:
    with weights_live.client() as client:
        yield client


def post(client: httpx.Client, path: str, body: Any = None, status: int = 200, **query: Any) -> Any:
    answer = client.post(path, json=body, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def update_info(tensors: Mapping[str, torch.Tensor], **fields: Any) -> dict[str, Any]:
    fields |= announced(tensors)
    return {"update_info": fields | {"dtype_names": fields.pop("dtypes")}}


def send_packed(trainer: TorchTrainer, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """One buffer, as vLLM's senders make of less than a GiB."""
    flat = [tensor.contiguous().view(torch.uint8).flatten() for _, tensor in tensors]
    trainer.send([torch.cat(flat)])


@contextmanager
def joined(client: httpx.Client) -> Iterator[TorchTrainer]:
    """The trainer's end of a group that the server has joined."""
    world_size = client.get("/get_world_size").json()["world_size"] + 1

    def join(address: dict[str, Any]) -> None:
        post(client, JOIN, {"init_info": address})

    with joined_trainer(join, "weight_update_group", world_size) as trainer:
        yield trainer


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's client, and vLLM's sender as it calls it, over gloo."""
    found = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.setattr(found, "is_vllm_available", lambda: True)

    def send(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        assert trainer_args.packed
        send_packed(trainer_args.group, iterator)

    engine = SimpleNamespace(trainer_send_weights=send)
    monkeypatch.setattr(found, "NCCLWeightTransferEngine", engine, raising=False)
    monkeypatch.setattr(found, "NCCLTrainerSendWeightsArgs", SimpleNamespace, raising=False)
    return found


def test_trl_generates(weights_live, trl, offline):
    client = trl.VLLMClient(base_url=weights_live.url)
    prompts = [[7, 8], [9, 10, 11]]
    answer = client.generate(
        prompts, n=2, temperature=0.9, max_tokens=12, logprobs=0, generation_kwargs={"seed": 3}
    )
    expected = offline.generate(
        prompts, SamplingParams(n=2, temperature=0.9, max_new_tokens=12, seed=3)
    )
    assert answer["prompt_ids"] == prompts
    assert answer["completion_ids"] == [rollout.token_ids for rollout in expected]
    assert answer["logprob_token_ids"] == [[[t] for t in rollout.token_ids] for rollout in expected]
    assert answer["logprobs"] == [[[lp] for lp in rollout.logprobs] for rollout in expected]


def test_trl_chats(weights_live, trl, offline):
    client = trl.VLLMClient(base_url=weights_live.url)
    conversation = [{"role": "user", "content": "one two"}]
    answer = client.chat(
        [conversation], n=2, max_tokens=8, logprobs=2, generation_kwargs={"seed": 4}
    )
    expected = offline.generate([conversation], SamplingParams(n=2, max_new_tokens=8, seed=4))
    assert answer["prompt_ids"] == [expected[0].prompt_ids]
    assert answer["completion_ids"] == [rollout.token_ids for rollout in expected]
    for likeliest, rollout in zip(answer["logprobs"], expected, strict=True):
        assert all(lp in top for lp, top in zip(rollout.logprobs, likeliest, strict=True))


def test_trl_trains(weights_live, client, trl, policies):
    theirs = trl.VLLMClient(base_url=weights_live.url)
    with pytest.raises(RuntimeError, match="no weight-transfer engine"):
        theirs.init_communicator(device="cpu")  # it would wait for a communicator of CUDA
    info = theirs.get_server_info()
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    with joined(client) as theirs.communicator:
        for weights in policies:
            tensors = list(weights.tensors.items())
            middle = len(tensors) // 2
            with theirs.weight_update():
                for part in (tensors[:middle], tensors[middle:]):
                    theirs.update_named_params(metadata(part), iter(part))
            theirs.reset_prefix_cache()
            options = {"seed": SEED, "ignore_eos": True}
            answer = theirs.generate(
                [PROMPT], temperature=SAMPLING["temperature"],
                max_tokens=SAMPLING["max_new_tokens"], generation_kwargs=options,
            )  # fmt: skip
            assert answer["completion_ids"] == [weights.output_ids]
            scored = theirs.get_sequence_logprobs(
                [PROMPT + weights.output_ids], [len(PROMPT)], top_logprobs=3,
                temperature=SAMPLING["temperature"],
            )  # fmt: skip
            (likeliest,) = scored["logprobs"]
            assert len(likeliest) == len(weights.output_ids)
            actual = scored["actual_logprobs"][0]
            assert actual == [[logprob] for (logprob,) in answer["logprobs"][0]]
            assert all(top == sorted(top, reverse=True) for top in likeliest)
        theirs.update_named_params(metadata(tensors), iter(tensors))  # all at once
        theirs.communicator = None


def metadata(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, str, list[int]]]:
    return [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in tensors
    ]


def test_trl_asynchronous(weights_live, client, policies):
    found = pytest.importorskip("trl.experimental.async_grpo.vllm_client")
    theirs = found.VLLMClient(weights_live.url)
    assert theirs.get_max_model_len() == 512
    assert theirs.get_dtype() == "torch.float32"
    assert theirs.get_server_info()["lora_config"] is None
    assert theirs.get_world_size() == 1
    with joined(client) as trainer:
        for weights in policies:
            theirs.pause()
            theirs.start_weight_update()
            info = update_info(weights.tensors, packed=True)["update_info"]
            with ThreadPoolExecutor(1) as threads:
                updating = threads.submit(theirs.update_weights, info)
                send_packed(trainer, iter(weights.tensors.items()))
                updating.result(HANG_SECONDS)
            theirs.finish_weight_update()
            theirs.resume()
            assert output_ids(client) == weights.output_ids


def test_skyrl(client, policies):
    with joined(client) as trainer:
        for weights in policies:
            post(client, "/pause", mode="keep", clear_cache="false")
            start = {
                "method": "skyrl_start_weight_update",
                "kwargs": {"is_checkpoint_format": True},
            }
            assert post(client, RPC, start) == {"results": [None]}
            receive = {"method": "update_weights_nccl", "kwargs": update_info(weights.tensors)}
            trainer.send_during(lambda body=receive: post(client, RPC, body), weights.tensors)
            post(client, RPC, {"method": "skyrl_finish_weight_update"})
            post(client, "/reset_prefix_cache", {"reset_running_requests": False})
            post(client, "/resume")
            assert output_ids(client) == weights.output_ids
        post(client, "/sleep", level="2")
        post(client, "/wake_up", tags=["weights"])
        post(client, "/start_weight_update", {"weight_version": 90})
        body = update_info(weights.tensors)
        trainer.send_during(lambda: post(client, "/update_weights", body), weights.tensors)
        post(client, "/finish_weight_update", {})
        post(client, "/wake_up", tags=["kv_cache"])
    assert output_ids(client) == weights.output_ids
    assert client.get("/get_weight_version").json() == {"weight_version": "90"}
    ids = post(client, "/tokenize", {"prompt": "one two", "add_special_tokens": True})["tokens"]
    assert post(client, "/detokenize", {"tokens": ids}) == {"prompt": "one two"}


def send_sparse(client, trainer, old, new, **fields: Any) -> httpx.Response:
    """One call of vLLM's sparse sender: of each tensor the places that changed, then the values."""
    info = update_info(new)["update_info"]
    places = [(new[name] != old[name]).flatten().nonzero().flatten().int() for name in new]
    info["num_updates_list"] = [len(each) for each in places]
    parts = {}
    for name, indices in zip(new, places, strict=True):
        parts |= {f"{name} places": indices, f"{name} values": new[name].flatten()[indices]}
    answers = []
    body = {"update_info": info} | fields
    trainer.send_during(lambda: answers.append(client.post("/update_weights", json=body)), parts)
    return answers[0]


def test_vllm_sparse(client, policies):
    old, new = policies[1], policies[0]
    with joined(client) as trainer:
        for number, (before, after) in enumerate([(old, new), (new, old)], start=94):
            post(client, "/start_weight_update")
            for last in (False, True):
                chunk = after.half(last=last)
                answer = send_sparse(client, trainer, before.tensors, chunk)
                assert answer.status_code == 200, answer.text
            post(client, "/finish_weight_update", {"weight_version": str(number)})
            assert client.get("/get_weight_version").json() == {"weight_version": str(number)}
            assert output_ids(client) == after.output_ids
        assert send_sparse(client, trainer, old.tensors, new.tensors).status_code == 200
        assert output_ids(client) == new.output_ids
        # Another trainer's weights, of which this one does not know:
        post(client, "/update_weights_from_disk", {"model_path": str(old.folder)})
        refused = send_sparse(client, trainer, new.tensors, old.tensors)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "base_version"
        assert output_ids(client) == old.output_ids
        assert send_sparse(
            client, trainer, old.tensors, new.tensors, base_version=97
        ).status_code == 200  # fmt: skip
        assert output_ids(client) == new.output_ids
        body = update_info(old.tensors)
        trainer.send_during(lambda: post(client, "/update_weights", body), old.tensors)
        assert output_ids(client) == old.output_ids
        for wrong, named in (
            ({"num_updates_list": [1]}, "update_info.num_updates_list"),
            ({"num_updates_list": [1] * len(body["update_info"]["names"]), "packed": True},
             "update_info.packed"),
        ):  # fmt: skip
            answer = client.post(
                "/update_weights", json={"update_info": body["update_info"] | wrong}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
        post(client, "/start_weight_update")
        trainer.send_during(lambda: post(client, "/update_weights", body), old.tensors)
        in_use = {"weight_version": client.get("/get_weight_version").json()["weight_version"]}
        assert "weight_version" in client.post("/finish_weight_update", json=in_use).text
        post(client, "/finish_weight_update", {"weight_version": "120"})
        post(client, "/shutdown_weight_transfer_engine")
        assert client.post("/update_weights", json=body).status_code == 400
    assert output_ids(client) == old.output_ids


def test_prime_rl(client, policies):
    for weights in policies:
        assert client.get("/liveness").status_code == 200
        post(client, "/pause", mode="keep", clear_cache="false")
        (weights.folder / "NCCL_READY").touch()
        post(client, "/update_weights", {"weight_dir": weights.folder.as_posix()})
        post(client, "/resume")
        assert output_ids(client) == weights.output_ids


def test_prime_rl_with_an_adapter(client, policies, weights_root):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(policies[1].folder, dtype=torch.float32)
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(weights_root / "adapter")
    model.merge_and_unload().save_pretrained(weights_root / "merged")
    load = {"lora_name": "policy", "lora_path": (weights_root / "adapter").as_posix()}
    post(client, "/load_lora_adapter", load)
    adapted = output_ids(client)
    assert adapted != policies[1].output_ids
    for _ in range(2):
        assert [each["id"] for each in client.get("/v1/models").json()["data"]][1:] == ["policy"]
        post(client, "/start_weight_update")  # of which nothing comes
        post(client, "/abandon_weight_update", {})
    asked = {"prompt": PROMPT, "max_tokens": 1}
    post(client, "/v1/completions", asked | {"model": "policy"})
    post(client, "/v1/completions", asked | {"model": policies[1].folder.name}, status=404)
    post(client, "/load_lora_adapter", load)  # each step of training, under one name
    assert output_ids(client) == adapted
    for path, wrong, status in (
        ("/load_lora_adapter", load | {"lora_path": str(weights_root / "late")}, 404),
        ("/v1/load_lora_adapter", load | {"lora_path": "/etc"}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "x"}, 422),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}, 404),
    ):
        assert client.post(path, json=wrong).status_code == status, path
    post(client, "/v1/unload_lora_adapter", {"lora_name": "policy"})
    assert output_ids(client) == policies[1].output_ids
    post(client, "/v1/completions", asked | {"model": "policy"}, status=404)
    post(client, "/v1/load_lora_adapter", load)
    post(client, "/update_weights_from_disk", {"model_path": str(weights_root / "merged")})
    assert output_ids(client) == adapted
    post(client, "/v1/completions", asked | {"model": "policy"}, status=404)
    post(client, "/update_weights", {"weight_dir": str(policies[1].folder)})


def test_what_fails_is_named_and_commits_nothing(client, policies):
    before = output_ids(client)
    pickled = update_info({}, ipc_handles_pickled="gASVAAAA")
    init = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    for path, body, named in (
        (JOIN, {"init_info": init | {"packed_num_buffers": 2}}, "init_info.backend"),
        (
            JOIN,
            {"init_info": init | {"backend": "gloo", "packed_buffer_size_bytes": 5}},
            "init_info.packed_buffer_size_bytes",
        ),
        ("/update_weights", pickled, "update_info.ipc_handles_pickled"),
        (RPC, {"method": "update_weights_ipc", "kwargs": pickled}, "ipc_handles_pickled"),
        (RPC, {"method": "save_model"}, "method"),
        (RPC, {"method": "skyrl_start_weight_update", "kwargs": {"x": 1}}, "kwargs.x"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"weight_dir": "/etc"}, "weight_dir"),
        ("/update_weights", update_info({}, group_name="nobody"), "group_name"),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code in (400, 422), (path, body)
        assert named in answer.json()["error"]["message"], (path, body)
    assert client.post("/finish_weight_update").status_code == 400  # none is open
    with joined(client) as trainer:
        post(client, "/start_weight_update")
        assert client.post("/start_weight_update").status_code == 400
        some = policies[0].half(last=False)
        body = update_info(some)
        trainer.send_during(lambda: post(client, "/update_weights", body), some)
        refused = client.post("/finish_weight_update")
        assert refused.status_code == 400
        assert "torn" in refused.json()["state"]
        post(client, "/update_weights", {"weight_dir": str(policies[1].folder)})
    assert output_ids(client) == before
