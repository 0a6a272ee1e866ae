"""Models with experts are what transformers computes, under the names it and checkpoints use."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from rollout.config import DType
from rollout.models.experts_config import ExpertsSpec
from rollout.models.loader import load_model
from rollout.models.spec import ModelSpec
from rollout.weights.source import TensorSource
from rollout.weights.transaction import WeightTransaction
from rollout.weights.update_options import UpdateOptions
from tests.helpers.dense_attention import logits_of
from tests.helpers.tiny_deepseek import OF_FAMILY, tiny_deepseek
from tests.helpers.tiny_hybrid import tiny_hybrid
from tests.helpers.tiny_moe import tiny_moe

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 11, 3, 70, 12, 9, 9, 41] * 5, [1], [96, 0, 2, 7]]
MODELS = {
    "qwen3_moe": tiny_moe,
    "qwen3_moe plain probabilities": lambda **options: tiny_moe(normalizes=False, **options),
    "qwen3_next": lambda **options: tiny_hybrid("qwen3_next", experts=True, **options),
    "qwen3_5": lambda **options: tiny_hybrid("qwen3_5", experts=True, **options),
}


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param]


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def test_logits(make, tmp_path):
    theirs = make()
    saved(theirs, tmp_path)
    for packing in (True, False):
        model = load_model(tmp_path, DType.auto, CPU, packing=packing)
        for prompt, ours in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
            expected = theirs(torch.tensor([prompt])).logits[0]
            assert (ours - expected).abs().max() < 1e-4 * expected.abs().max(), packing


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5", *OF_FAMILY])
@torch.inference_mode()
def test_fused_and_single_experts_are_one_update(name, tmp_path):
    """From a trainer's memory, where transformers fuses them, and from its files, where not."""
    make = MODELS.get(name) or partial(tiny_deepseek, name)
    model = load_model(saved(make(), tmp_path / "old"), DType.auto, CPU)
    trainer = make(seed=1)
    saved(trainer, tmp_path / "new")
    fused = trainer.state_dict()
    single = load_file(tmp_path / "new" / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    expected = logits_of(load_model(tmp_path / "new", DType.auto, CPU), PROMPTS)
    transaction = WeightTransaction({"target": model}, passes_over=model.spec.passes_over)
    for tensors in (fused, make().state_dict(), single):
        transaction.begin(UpdateOptions())
        transaction.load(TensorSource(tensors))
        transaction.commit()
        is_old = tensors is not fused and tensors is not single
        for ours, theirs in zip(logits_of(model, PROMPTS), expected, strict=True):
            assert torch.equal(ours, theirs) != is_old


def spec_of(folder, model, **changes) -> ModelSpec:
    model.config.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [type(model).__name__]} | changes
    file.write_text(json.dumps({name: it for name, it in config.items() if it != "absent"}))
    return ModelSpec.read(folder)


def test_which_layers_are_sparse(tmp_path):
    spec = spec_of(tmp_path, tiny_moe(num_layers=5))
    assert spec.experts == ExpertsSpec(
        layers=(0, 2, 3, 4), num_experts=7, experts_per_token=3, ffn_size=24, normalizes=True
    )
    assert spec.ffn_size == 80
    assert spec_of(tmp_path, tiny_moe(num_layers=5), decoder_sparse_step=2).experts.layers == (3,)
    assert spec_of(tmp_path, tiny_moe(), mlp_only_layers=[0, 1, 2]).experts is None
    all_sparse = spec_of(tmp_path, tiny_moe(), mlp_only_layers=[], intermediate_size="absent")
    assert all_sparse.experts.layers == (0, 1, 2)
    other_name = {"num_local_experts": "absent", "num_experts": 5}
    assert spec_of(tmp_path, tiny_moe(), **other_name).experts.num_experts == 5
    spec = spec_of(tmp_path, MODELS["qwen3_next"]())
    assert spec.experts.layers == (0, 2, 3)
    assert (spec.experts.shared_ffn_size, spec.experts.normalizes) == (40, True)
    assert spec_of(tmp_path, MODELS["qwen3_5"]()).experts.layers == (0, 1, 2, 3)
