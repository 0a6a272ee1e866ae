"""Logits of every family and rope type against transformers, from the same folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollout.config import DType
from rollout.models.loader import load_model
from tests.helpers.dense_attention import logits_of

CPU = torch.device("cpu")
VOCAB = 131
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def heads(heads: int, kv_heads: int) -> dict:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


def rope(rope_type: str, **params) -> dict:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 5000.0, **params}}


LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 3.0}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, **heads(6, 6)),
    "llama-tied-gqa3": LlamaConfig(**SMALL, **heads(6, 2), tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SMALL, **heads(6, 3), attention_bias=True, mlp_bias=True),
    "llama-wide-heads": LlamaConfig(**SMALL, **heads(4, 1), head_dim=22),
    "llama-linear": LlamaConfig(**SMALL, **heads(6, 2), **rope("linear", factor=2.5)),
    "llama-dynamic": LlamaConfig(**SMALL, **heads(6, 2), **rope("dynamic", factor=2.0)),
    "llama-llama3": LlamaConfig(**SMALL, **heads(6, 2), **rope("llama3", **LLAMA3)),
    "llama-yarn": LlamaConfig(**SMALL, **heads(4, 2), **rope("yarn", **YARN)),
    "llama-yarn-mscale": LlamaConfig(
        **SMALL, **heads(4, 2), **rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.3)
    ),
    "mistral": MistralConfig(**SMALL, **heads(8, 2), head_dim=10, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL, **heads(4, 2)),
    "qwen2-tied-yarn": Qwen2Config(
        **SMALL,
        **heads(4, 1),
        tie_word_embeddings=True,
        **rope("yarn", **YARN, attention_factor=1.1),
    ),
    "qwen3": Qwen3Config(**SMALL, **heads(4, 1), head_dim=26),
    "qwen3-biases-tied": Qwen3Config(
        **SMALL, **heads(4, 2), head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
}


def save_random(config, folder, seed: int = 0):
    """A random model with norms and biases away from one and zero, saved; the oracle itself."""
    torch.manual_seed(seed)
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    oracle.save_pretrained(folder)
    return oracle


def sequences(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


@torch.inference_mode()
def assert_parity(model, oracle, prompts, tolerance: float) -> None:
    for tokens, ours in zip(prompts, logits_of(model, prompts), strict=True):
        theirs = oracle(torch.tensor([tokens])).logits[0].float()
        error = (ours.float() - theirs).abs().max() / theirs.abs().max()
        assert error < tolerance, f"{len(tokens)} tokens: relative error {error:.2e}"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "plain"])
def test_logits(name, packing, tmp_path):
    oracle = save_random(CONFIGS[name], tmp_path)
    model = load_model(tmp_path, DType.auto, CPU, packing=packing)
    assert model.dtype == torch.float32
    assert all(linear.is_packed == packing for linear in model.linears())
    assert_parity(model, oracle, sequences(1, 17, 64, 5), 1e-5)


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-linear"])
def test_logits_beyond_the_trained_context(name, tmp_path):
    """Dynamic agrees where transformers' running maximum is our fixed one: at full length."""
    oracle = save_random(CONFIGS[name], tmp_path)
    model = load_model(tmp_path, DType.auto, CPU, max_context_len=100)
    assert_parity(model, oracle, sequences(100), 1e-5)


def test_the_layout_before_transformers_5_is_the_same_model(tmp_path):
    oracle = save_random(CONFIGS["llama-llama3"], tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    params = config.pop("rope_parameters")
    config["rope_theta"] = params.pop("rope_theta")
    config["rope_scaling"] = {"type": params.pop("rope_type"), **params}
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config))
    assert_parity(load_model(tmp_path, DType.auto, CPU), oracle, sequences(40), 1e-5)


def test_sharded_bfloat16_checkpoint_in_float32(tmp_path):
    random = save_random(CONFIGS["qwen2"], tmp_path / "whole")
    folder = tmp_path / "sharded"
    random.bfloat16().save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(folder, DType.float32, CPU)
    assert_parity(model, oracle, sequences(30, 3), 1e-5)


def test_bfloat16_errs_no_more_than_transformers_does(tmp_path):
    exact = save_random(CONFIGS["llama-tied-gqa3"], tmp_path)
    model = load_model(tmp_path, DType.bfloat16, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    (prompt,) = sequences(64)
    with torch.inference_mode():
        truth = exact(torch.tensor([prompt])).logits[0]
        their_error = (theirs(torch.tensor([prompt])).logits[0] - truth).abs().mean()
    our_error = (logits_of(model, [prompt])[0] - truth).abs().mean()
    assert our_error < 1.3 * their_error


def test_demo_model(demo_model_path):
    oracle = AutoModelForCausalLM.from_pretrained(demo_model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    model = load_model(demo_model_path, DType.float32, CPU)
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n    if n < 2:\n        return n\n",
        "x  5 + 17 = 22. " * 8,
    ]
    assert_parity(model, oracle, [tokenizer.encode(text) for text in texts], 1e-5)
