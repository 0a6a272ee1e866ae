"""The calls of a training step of slime, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.helpers.torch_trainer import TorchTrainer, joined_trainer
from tests.server.conftest import Live
from tests.server.policies import PROMPT, SAMPLING, Policy, announced

SEEDED = {"input_ids": PROMPT, "sampling_params": SAMPLING | {"sampling_seed": 4}}
Post = Callable[..., Any]


@pytest.fixture(scope="module")
def policies(first: Policy, second: Policy) -> tuple[Policy, Policy]:
    return first, second


@pytest.fixture
def client(weights_live: Live) -> Iterator[httpx.Client]:
    with weights_live.client() as client:
        yield client


@pytest.fixture
def post(client: httpx.Client) -> Post:
    """Posts JSON as the trainers' clients do: any status but 200 is an error."""

    def post(path: str, payload: dict[str, Any] | None = None) -> Any:
        answer = client.post(path, json=payload or {})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


@contextmanager
def joined(post: Post, group_name: str) -> Iterator[TorchTrainer]:
    """The trainer's end of a group, joined and left as for each new set of engines."""
    group = {"group_name": group_name}

    def join(address: dict[str, Any]) -> None:
        port = {"master_port": str(address["master_port"])}  # AReaL's is a text
        post("/init_weights_update_group", address | port | group)

    with joined_trainer(join, group_name) as trainer:
        yield trainer
        post("/destroy_weights_update_group", group)


def broadcast(trainer: TorchTrainer, post: Post, weights: Policy, **fields: Any) -> None:
    """Send an update in two buckets."""
    for bucket in weights.halves:
        payload = announced(bucket) | fields
        trainer.send_during(
            lambda body=payload: post("/update_weights_from_distributed", body), bucket
        )


def test_a_step_of_slime(client, post, policies):
    first, second = policies
    assert client.get("/health_generate").status_code == 200
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
    post("/abort_request", {"abort_all": True})
    loads = client.get("/v1/loads", params={"include": "core,disagg,queues"}).json()["loads"]
    assert [load["num_total_reqs"] for load in loads] == [0]
    unknown = client.post("/destroy_weights_update_group", json={"group_name": "slime-pp_0"})
    assert unknown.status_code == 400  # it goes on: the engine is new
    for number, weights in enumerate((second, first), start=1):
        with joined(post, "slime-pp_0") as trainer:
            post("/pause_generation")
            assert client.get("/flush_cache").status_code == 200
            fields = {"group_name": "slime-pp_0", "flush_cache": False}
            broadcast(trainer, post, weights, **fields, weight_version=str(number))
            post("/continue_generation")
        answer = post("/generate", SEEDED)
        assert answer["output_ids"] == weights.output_ids
        assert answer["meta_info"]["weight_version"] == str(number)
