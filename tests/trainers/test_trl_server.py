"""GRPO with ``vllm_mode="server"``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from tests.helpers.trainer_checks import engine_of
from tests.helpers.trl_runs import by_generation, run
from tests.server.conftest import run_server

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with run_server(model, {"dtype": "float32", "num_threads": 1}, {}) as live:
        yield live.url


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
    own = ColocatedEngine(engine_of(model), torch.nn.Linear(1, 1))
    wanted = own.generate(prompts, params, seeds, samples_per_prompt=1)
    found = ServerEngine(url, HANG_SECONDS).generate(prompts, params, seeds)
    assert seen(found) == seen(wanted)


def test_a_run_is_that_of_an_engine_in_the_process(model: Path, url: str, tmp_path: Path) -> None:
    """Adapters come alone, to the server's own base."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft = {"arguments": {"peft_config": lora}}
    own = run(by_generation(model, tmp_path / "own", **peft))
    trainer = by_generation(
        model, tmp_path / "served", **peft, ours={"adapters_only": True}, vllm_mode="server",
        vllm_server_base_url=url, vllm_server_timeout=HANG_SECONDS,
    )  # fmt: skip
    trainer.train()
    assert trainer.reward_funcs[0].completion_ids == own.completion_ids
    assert trainer.vllm_generation.engine.weight_version == 3
    accept_lengths = [each["specrollout/accept_length"] for each in trainer.state.log_history[:3]]
    assert min(accept_lengths) >= 1


def test_an_update_that_fails_is_abandoned(model: Path, url: str) -> None:
    engine, weights = ServerEngine(url, HANG_SECONDS), load_file(model / "model.safetensors")
    params = SamplingParams(max_new_tokens=3)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:3]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.update_weights_from_tensor(failing())
    with pytest.raises(RolloutError, match=r"/update_weights_from_tensor: 400: .*unknown"):
        engine.update_weights_from_tensor([("unknown", torch.ones(3))])
    engine.update_weights_from_tensor(weights.items())
    assert engine.generate([[5]], params, [1])[0].token_ids
