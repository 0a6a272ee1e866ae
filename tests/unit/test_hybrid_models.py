"""Qwen3-Next and Qwen3.5 are what transformers computes."""

import pytest
import torch

from rollout.config import DType
from rollout.models.loader import load_model
from tests.helpers.dense_attention import logits_of
from tests.helpers.tiny_hybrid import save_tiny_hybrid, tiny_hybrid

CPU = torch.device("cpu")
FAMILIES = ("qwen3_5", "qwen3_next")
PROMPTS = [[5, 9, 11, 3, 70, 12, 9, 9, 41], [1], [96, 0, 2, 7]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_prefill(family, tied, tmp_path):
    model = load_model(save_tiny_hybrid(tmp_path, family, tied=tied), DType.auto, CPU)
    theirs = tiny_hybrid(family, tied=tied)
    for prompt, ours in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
