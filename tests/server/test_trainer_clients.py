"""The requests of slime and AReaL, spelled out, in the order of one training step.

Both were written for sglang. AReaL's own code is driven in tests/frameworks/areal.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rollout.config import DType
from rollout.errors import CheckpointError
from rollout.models.loader import load_model
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.ports import free_port
from tests.helpers.torch_trainer import TorchTrainer
from tests.server.conftest import Live, run_server
from tests.server.policies import PROMPT, SAMPLING, Policy, announced, policy, read_policy


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights-root")


@pytest.fixture(scope="module")
def policies(text_model_path: Path, root: Path) -> tuple[Policy, Policy]:
    return read_policy(text_model_path), policy(root / "second", 1)


@pytest.fixture(scope="module")
def shared(text_model_path: Path, root: Path) -> Iterator[Live]:
    with run_server(text_model_path, {"num_threads": 1}, {"weights_root": str(root)}) as live:
        yield live


@pytest.fixture
def post(shared: Live) -> Iterator[Callable[..., Any]]:
    """Posts JSON as the trainers' clients do: any status but 200 is an error, the answer is
    JSON."""
    with shared.client() as client:

        def post(path: str, payload: dict | None = None) -> Any:
            return checked(client.post(path, json=payload or {}))

        yield post


def checked(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def halves(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    names = list(tensors)
    middle = len(names) // 2
    return [{name: tensors[name] for name in part} for part in (names[:middle], names[middle:])]


def test_a_step_of_slime(shared, post, policies):
    first, second = policies
    with shared.client() as client:
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
            with slime_group(post) as trainer:
                post("/pause_generation")
                assert client.get("/flush_cache").status_code == 200
                for bucket in halves(dict(weights.tensors)):
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


def test_slime_with_a_shared_disk_and_sleep(shared, post, policies):
    first, second = policies
    with shared.client() as client:
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


def test_slime_with_differences(shared, post, policies, root, tmp_path):
    pytest.importorskip("zstandard")
    pytest.importorskip("blake3")
    from tests.helpers.slime_publisher import publish

    first, second = policies
    local, source = root / "local", root / "published"
    source.mkdir()
    pull = {"local_checkpoint_dir": str(local), "source_dir": str(source)}
    post("/pull_weights", pull | {"target_version": 0})
    with shared.client() as client:
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
            ({"source_dir": str(root / "absent")}, "source_dir"),
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


def test_pulls_that_wait_leave_chats_alone(shared, post, root):
    source = root / "nothing-published"
    source.mkdir()
    folder = root / "pulled-late"
    pull = {"local_checkpoint_dir": str(folder), "source_dir": str(source), "target_version": 0}
    post("/pull_weights", pull)
    pulls = 40  # asyncio's own threads are at most 32
    with (
        (folder / ".weight_sync" / "lock").open() as lock,
        ThreadPoolExecutor(pulls) as threads,
        shared.client() as client,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = [threads.submit(client.post, "/pull_weights", json=pull) for _ in range(pulls)]
        try:
            in_flight = shared.serving.http_metrics.in_flight
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


def test_a_step_of_areal(shared, post, policies):
    first, second = policies
    with shared.client() as client:
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

    port = free_port()
    init = {
        "master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1,
        "world_size": 2, "backend": "gloo", "group_name": "update_weight_group",
    }  # fmt: skip
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(post, "/init_weights_update_group", init)
        trainer = TorchTrainer(port, group_name="update_weight_group")
        joining.result(HANG_SECONDS)
    try:
        for weights in (second, first):
            post("/pause_generation")
            for bucket in halves(dict(weights.tensors)):
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
    finally:
        trainer.close()
        post("/destroy_weights_update_group", {"group_name": "update_weight_group"})
    post(
        "/update_weights_from_disk", {"model_path": str(second.folder), "abort_all_requests": True}
    )
    post("/update_weights_from_disk", {"model_path": str(first.folder), "abort_all_requests": True})
    post("/release_memory_occupation")
    post("/resume_memory_occupation")


def seeded() -> dict[str, Any]:
    return SAMPLING | {"sampling_seed": 4}


class slime_group:  # noqa: N801 (a context manager)
    """The trainer's end of the group, joined and left as slime does for each new set of engines."""

    def __init__(self, post: Callable[..., Any]) -> None:
        self._post = post

    def __enter__(self) -> TorchTrainer:
        port = free_port()
        body = {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
            "world_size": 2, "group_name": "slime-pp_0", "backend": "gloo",
        }  # fmt: skip
        with ThreadPoolExecutor(1) as threads:
            joining = threads.submit(self._post, "/init_weights_update_group", body)
            self._trainer = TorchTrainer(port, group_name="slime-pp_0")
            joining.result(HANG_SECONDS)
        return self._trainer

    def __exit__(self, *_: object) -> None:
        self._post("/destroy_weights_update_group", {"group_name": "slime-pp_0"})
        self._trainer.close()
