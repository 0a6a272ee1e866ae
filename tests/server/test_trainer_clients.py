"""The requests of slime and AReaL, spelled out, in the order of one training step.

Both were written for sglang. AReaL's own code is driven in tests/frameworks/areal.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from rollout.config import DType
from rollout.errors import CheckpointError
from rollout.models.loader import load_model
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.torch_trainer import TorchTrainer, joined_trainer
from tests.server.conftest import Live
from tests.server.policies import PROMPT, SAMPLING, Policy, announced


@pytest.fixture(scope="module")
def policies(first: Policy, second: Policy) -> tuple[Policy, Policy]:
    return first, second


@pytest.fixture
def post(weights_live: Live) -> Iterator[Callable[..., Any]]:
    """Posts JSON as the trainers' clients do: any status but 200 is an error, the answer is
    JSON."""
    with weights_live.client() as client:

        def post(path: str, payload: dict | None = None) -> Any:
            return checked(client.post(path, json=payload or {}))

        yield post


def checked(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_step_of_slime(weights_live, post, policies):
    first, second = policies
    with weights_live.client() as client:
        assert client.get("/health_generate").status_code == 200
        assert client.get("/flush_cache").status_code == 200
        arguments = client.get("/get_server_info").json()
        assert (arguments["tp_size"], arguments["nnodes"]) == (1, 1)

        sampling = {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "stop": None,
            "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True,
            "spaces_between_special_tokens": False, "sampling_seed": 3,
        }  # fmt: skip
        rollout = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        answer = post("/generate", rollout)
        meta = answer["meta_info"]
        assert [token for _, token, *_ in meta["output_token_logprobs"]] == answer["output_ids"]
        assert meta["finish_reason"]["type"] in ("stop", "length")
        assert meta["weight_version"] == client.get("/get_weight_version").json()["weight_version"]
        assert {"cached_tokens", "prompt_tokens", "completion_tokens"} <= meta.keys()

        post("/abort_request", {"abort_all": True})
        loads = client.get("/v1/loads", params={"include": "core,disagg,queues"}).json()["loads"]
        assert [load["num_total_reqs"] for load in loads] == [0]

        unknown = client.post("/destroy_weights_update_group", json={"group_name": "slime-pp_0"})
        assert unknown.status_code == 400  # it goes on: the engine is new
        for number, weights in enumerate((second, first), start=1):
            with joined(post, "slime-pp_0") as trainer:
                post("/pause_generation")
                assert client.get("/flush_cache").status_code == 200
                for bucket in weights.halves:
                    payload = announced(bucket) | {
                        "group_name": "slime-pp_0",
                        "flush_cache": False,
                        "weight_version": str(number),
                    }
                    trainer.send_during(
                        lambda body=payload: post("/update_weights_from_distributed", body),
                        bucket,
                    )
                post("/continue_generation")
            version = client.get("/get_weight_version").json()["weight_version"]
            assert version == str(number)
            answer = post("/generate", {"input_ids": PROMPT, "sampling_params": seeded()})
            assert answer["output_ids"] == weights.output_ids
            assert answer["meta_info"]["weight_version"] == str(number)


def test_slime_with_a_shared_disk_and_sleep(weights_live, post, policies):
    first, second = policies
    with weights_live.client() as client:
        for number, weights in enumerate((second, first), start=10):
            assert client.get("/flush_cache").status_code == 200
            post("/release_memory_occupation")
            post("/resume_memory_occupation", {"tags": ["weights"]})
            post("/pause_generation")
            body = {"model_path": str(weights.folder), "weight_version": str(number)}
            post("/update_weights_from_disk", body)
            post("/continue_generation")
            post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
            assert post("/weights_checker", {"action": "checksum"})["success"] is True
            answer = post("/generate", {"input_ids": PROMPT, "sampling_params": seeded()})
            assert answer["output_ids"] == weights.output_ids


def test_slime_with_differences(weights_live, post, policies, weights_root, tmp_path):
    pytest.importorskip("zstandard")
    pytest.importorskip("blake3")
    from tests.helpers.slime_publisher import publish

    first, second = policies
    local, source = weights_root / "local", weights_root / "published"
    source.mkdir()
    pull = {"local_checkpoint_dir": str(local), "source_dir": str(source)}
    post("/pull_weights", pull | {"target_version": 0})
    with weights_live.client() as client:
        for number, (old, new) in enumerate([(first, second), (second, first)], start=1):
            publish(source, number, old.tensors, new.tensors)
            post("/pull_weights", pull | {"target_version": number})
            post("/pause_generation")
            assert client.get("/flush_cache").status_code == 200
            body = {"model_path": str(local), "weight_version": str(100 + number)}
            post("/update_weights_from_disk", body)
            post("/continue_generation")
            answer = post("/generate", {"input_ids": PROMPT, "sampling_params": seeded()})
            assert answer["output_ids"] == new.output_ids
        for wrong, named in (
            ({"local_checkpoint_dir": "/tmp/elsewhere"}, "local_checkpoint_dir"),
            ({"source_dir": str(weights_root / "absent")}, "source_dir"),
            ({"target_version": 7}, "version 7 was not published"),
            ({"local_checkpoint_dir": str(second.folder)}, "something else"),
        ):
            answer = client.post("/pull_weights", json=pull | {"target_version": 2} | wrong)
            assert answer.status_code == 400, answer.text
            assert named in answer.json()["message"]
        file = publish(source, 3, first.tensors, second.tensors)
        file.rename(tmp_path / "outside")
        for link, version in ((file, 3), (local / "more", 2)):
            link.symlink_to(tmp_path / "outside")
            answer = client.post("/pull_weights", json=pull | {"target_version": version})
            assert answer.status_code == 400
            assert f"{link.name} is a link that leads elsewhere" in answer.json()["message"]
            link.unlink()


def test_pulls_that_wait_leave_chats_alone(weights_live, post, weights_root):
    source = weights_root / "nothing-published"
    source.mkdir()
    folder = weights_root / "pulled-late"
    pull = {"local_checkpoint_dir": str(folder), "source_dir": str(source), "target_version": 0}
    post("/pull_weights", pull)
    pulls = 40  # asyncio's own threads are at most 32
    with (
        (folder / ".weight_sync" / "lock").open() as lock,
        ThreadPoolExecutor(pulls) as threads,
        weights_live.client() as client,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = [threads.submit(client.post, "/pull_weights", json=pull) for _ in range(pulls)]
        try:
            in_flight = weights_live.serving.http_metrics.in_flight
            wait_until(lambda: in_flight.collect()[0].samples[0].value >= pulls)
            model = client.get("/v1/models").json()["data"][0]["id"]
            chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            checked(client.post("/v1/chat/completions", json=chat))
            answer = client.post("/update_weights_from_disk", json={"model_path": str(folder)})
            assert answer.status_code == 400
            assert "under way" in answer.json()["message"]
            with pytest.raises(CheckpointError, match="under way"):
                load_model(folder, DType.float32, torch.device("cpu"))
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
        assert all(pull.result(HANG_SECONDS).status_code == 200 for pull in waiting)


def test_a_step_of_areal(weights_live, post, policies):
    first, second = policies
    with weights_live.client() as client:
        assert client.get("/health").status_code == 200
    sampling = {
        "top_p": 1.0, "top_k": 100000000, "max_new_tokens": 12, "temperature": 0.0,
        "stop_token_ids": [], "ignore_eos": True, "skip_special_tokens": True,
        "frequency_penalty": 0.0,
    }  # fmt: skip
    body = {
        "input_ids": PROMPT, "image_data": [], "sampling_params": sampling,
        "return_logprob": True, "stream": False,
    }  # fmt: skip
    meta = post("/generate", body)["meta_info"]
    output = [token for _, token, *_ in meta["output_token_logprobs"]]
    assert meta["finish_reason"]["type"] == "length"
    scoring = {
        "input_ids": PROMPT + output,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": len(PROMPT) - 1,
        "top_logprobs_num": 0,
        "stream": False,
    }
    scored = post("/generate", scoring)["meta_info"]["input_token_logprobs"][-len(output) :]
    expected = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    assert [logprob for logprob, *_ in scored] == pytest.approx(expected, abs=1e-6)

    with joined(post, "update_weight_group", port_of=str) as trainer:
        for weights in (second, first):
            post("/pause_generation")
            for bucket in weights.halves:
                payload = announced(bucket) | {
                    "group_name": "update_weight_group",
                    "abort_all_requests": True,
                }
                trainer.send_during(
                    lambda body=payload: post("/update_weights_from_distributed", body), bucket
                )
            post("/continue_generation")
            answer = post("/generate", {"input_ids": PROMPT, "sampling_params": seeded()})
            assert answer["output_ids"] == weights.output_ids
    post(
        "/update_weights_from_disk", {"model_path": str(second.folder), "abort_all_requests": True}
    )
    post("/update_weights_from_disk", {"model_path": str(first.folder), "abort_all_requests": True})
    post("/release_memory_occupation")
    post("/resume_memory_occupation")


def seeded() -> dict[str, Any]:
    return SAMPLING | {"sampling_seed": 4}


@contextmanager
def joined(
    post: Callable[..., Any], group_name: str, port_of: Callable[[int], object] = int
) -> Iterator[TorchTrainer]:
    """The trainer's end of a group, joined and left as for each new set of engines."""
    group = {"group_name": group_name}

    def join(address: dict[str, Any]) -> None:
        port = {"master_port": port_of(address["master_port"])}
        post("/init_weights_update_group", address | port | group)

    with joined_trainer(join, group_name) as trainer:
        yield trainer
        post("/destroy_weights_update_group", group)
