"""GRPO with ``vllm_mode="server"`` and a server of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from peft import LoraConfig
from safetensors.torch import load_file

from rollout.errors import RolloutError
from rollout.trainers.trl import server_engine
from rollout.trainers.trl.colocated import ColocatedEngine
from rollout.trainers.trl.server_engine import ServerEngine
from rollout.types import Rollout, SamplingParams
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.trl_runs import by_generation, run, small_engine
from tests.server.server_process import served

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with served(model, "parallel=tensor", "parallel.size=2") as (_, url):
        yield url


def served_by(url: str) -> dict[str, Any]:
    return {
        "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": HANG_SECONDS,
    }  # fmt: skip


def seen(rollouts: list[Rollout]) -> list[tuple[object, ...]]:
    return [
        (each.token_ids, each.logprobs, each.extras.top_logprobs, each.finish_reason)
        for each in rollouts
    ]


def test_rollouts_are_those_of_an_engine_in_the_process(
    model: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "_PROMPTS_OF_CALL", 2)  # fewer than there are
    params = SamplingParams(
        max_new_tokens=20, temperature=0.8, top_p=0.9, top_logprobs=2, stop_token_ids=[2],
        ignore_eos=True, logit_bias={7: 1.0}, repetition_penalty=1.1,
    )  # fmt: skip
    prompts, seeds = [[7, 8], [7, 8], [9, 10, 11]], [2**63 + 5, 2**63 + 6, 7]
    own = ColocatedEngine(small_engine(model), torch.nn.Linear(1, 1))
    wanted = own.generate(prompts, params, seeds, samples_per_prompt=1)
    found = ServerEngine(url, HANG_SECONDS).generate(prompts, params, seeds)
    assert seen(found) == seen(wanted)


def test_a_run_is_that_of_an_engine_in_the_process(model: Path, url: str, tmp_path: Path) -> None:
    own = run(by_generation(model, tmp_path / "own"))
    trainer = by_generation(model, tmp_path / "served", **served_by(url))
    trainer.train()
    assert trainer.reward_funcs[0].completion_ids == own.completion_ids
    engine = trainer.vllm_generation.engine
    assert engine.weight_version == 3

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(trainer.model.named_parameters())[:3]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.update_weights_from_tensor(failing())
    with pytest.raises(RolloutError, match=r"/update_weights_from_tensor: 400: .*unknown"):
        engine.update_weights_from_tensor([("unknown", torch.ones(3))])
    trainer.vllm_generation.sync_weights()
    assert engine.generate([[5]], SamplingParams(max_new_tokens=3), [1])[0].token_ids


def test_adapters_come_alone(model: Path, url: str, tmp_path: Path) -> None:
    base = ServerEngine(url, HANG_SECONDS)
    base.update_weights_from_tensor(load_file(model / "model.safetensors").items())
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft = {"arguments": {"peft_config": lora}}
    own = run(by_generation(model, tmp_path / "own", **peft))
    alone = {"ours": {"adapters_only": True}}
    trainer = by_generation(model, tmp_path / "served", **peft, **alone, **served_by(url))
    trainer.train()
    assert trainer.reward_funcs[0].completion_ids == own.completion_ids
