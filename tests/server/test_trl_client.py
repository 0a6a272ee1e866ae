"""TRL's own client of vLLM's server, unmodified, gets tokens and logprobs from this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout import RolloutEngine, SamplingParams
from tests.server.conftest import Live

vllm_client = pytest.importorskip("trl.generation.vllm_client")


@pytest.fixture
def client(live: Live, monkeypatch: pytest.MonkeyPatch) -> object:
    # It asks whether vLLM is installed, though only its weight transport imports it.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    return vllm_client.VLLMClient(base_url=live.url)


@pytest.fixture(scope="module")
def offline(text_model_path: Path) -> RolloutEngine:
    return RolloutEngine.from_pretrained(text_model_path, "none")


def test_generate(client: object, offline: RolloutEngine) -> None:
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


def test_chat(client: object, offline: RolloutEngine) -> None:
    conversation = [{"role": "user", "content": "one two"}]
    answer = client.chat(
        [conversation], n=2, max_tokens=8, logprobs=2, generation_kwargs={"seed": 4}
    )
    expected = offline.generate([conversation], SamplingParams(n=2, max_new_tokens=8, seed=4))
    assert answer["prompt_ids"] == [expected[0].prompt_ids]
    assert answer["completion_ids"] == [rollout.token_ids for rollout in expected]
    for likeliest, rollout in zip(answer["logprobs"], expected, strict=True):
        assert all(lp in top for lp, top in zip(rollout.logprobs, likeliest, strict=True))
