"""A trainer's exact forward by the code of a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutEngine, SamplingParams
from rollout.trainers.exact import exact_forward, token_logprobs


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_logprobs_are_the_rollouts_bit_for_bit(small_model_path, device, dtype) -> None:
    engine = RolloutEngine.from_pretrained(
        small_model_path, "ngram", device=device.type, dtype=dtype, max_running=3, kv_bytes=1 << 20,
        spec_options={"budget": "fixed", "calibration_seconds": 0},
    )  # fmt: skip
    params = SamplingParams(temperature=0.8, max_new_tokens=8, seed=3, n=2, ignore_eos=True)
    rollouts = engine.generate([[5, 6, 7], [9] * 5], params)
    model = AutoModelForCausalLM.from_pretrained(small_model_path, dtype=dtype).to(device)
    ids = torch.zeros(len(rollouts), 13, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, rollout in enumerate(rollouts):
        tokens = torch.tensor(rollout.prompt_ids + rollout.token_ids)
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    ids, mask = ids.to(device), mask.to(device)
    with exact_forward(model):
        logprobs = token_logprobs(model(ids, mask, use_cache=False).logits[:, :-1], ids[:, 1:], 0.8)
        logprobs.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    for row, rollout in enumerate(rollouts):
        first = len(rollout.prompt_ids) - 1
        own = logprobs[row, first : first + len(rollout.token_ids)]
        assert own.tolist() == rollout.logprobs
