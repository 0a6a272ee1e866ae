"""Families beside Llama are what transformers computes, under the names it uses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rollout.config import DType
from rollout.errors import CheckpointError
from rollout.models.layers.grouped_linear import GroupedLinear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.loader import load_model
from rollout.models.mxfp4 import dequantised
from rollout.models.spec import ModelSpec
from rollout.ops.group_rows import group_rows
from rollout.weights.source import TensorSource
from rollout.weights.transaction import WeightTransaction
from rollout.weights.update_options import UpdateOptions
from tests.helpers.dense_attention import logits_of
from tests.helpers.tiny_families import CONFIGS, save_tiny_family, tiny_family

CPU = torch.device("cpu")


def sequences(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(11)
    return [torch.randint(97, (length,), generator=random).tolist() for length in lengths]


@torch.inference_mode()
def assert_parity(model, theirs, prompts, tolerance: float = 1e-5) -> None:
    for tokens, ours in zip(prompts, logits_of(model, prompts), strict=True):
        expected = theirs(torch.tensor([tokens])).logits[0]
        error = (ours - expected).abs().max() / expected.abs().max()
        assert error < tolerance, f"{len(tokens)} tokens: relative error {error:.2e}"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_as_loaded_and_after_an_update(name, tmp_path):
    """A trainer's tensors have the names in memory, from which fused projections are read too."""
    model = load_model(save_tiny_family(tmp_path, name), DType.auto, CPU, 100)
    assert_parity(model, tiny_family(name), sequences(1, 17, 45, 5))
    trainer = tiny_family(name, seed=1)
    transaction = WeightTransaction({"target": model}, passes_over=model.spec.passes_over)
    transaction.begin(UpdateOptions())
    transaction.load(TensorSource(trainer.state_dict()))
    transaction.commit()
    assert_parity(model, trainer, sequences(9))


def test_long_factors_are_those_of_the_longest_context(tmp_path):
    model = load_model(save_tiny_family(tmp_path, "phi3 long"), DType.auto, CPU)
    assert_parity(model, tiny_family("phi3 long"), sequences(101, 130))


@torch.inference_mode()
def test_experts_of_gpt_oss_in_mxfp4(tmp_path):
    """Every byte and many exponents, read as transformers reads them, once into a whole model."""
    random = torch.Generator().manual_seed(3)
    blocks = torch.randint(256, (2, 3, 5, 16), generator=random, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    scales = torch.randint(90, 150, (2, 3, 5), generator=random, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(dequantised(blocks, scales), expected)

    save_tiny_family(tmp_path, "gpt-oss")
    file, theirs = tmp_path / "model.safetensors", tiny_family("gpt-oss")
    tensors, state = load_file(file), theirs.state_dict()
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        experts, inputs, outputs = tensors.pop(name).shape
        groups = inputs // 32
        shape = (experts, outputs, groups, 16)
        tensors[f"{name}_blocks"] = torch.randint(256, shape, generator=random, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(shape[:3], 124, dtype=torch.uint8)
        state[name].copy_(
            convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        )
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, DType.float32, CPU, 100)
    assert_parity(model, theirs, sequences(17))
    kept = {part: tensors.pop(f"{name}{part}") for part in ("_blocks", "_scales")}
    short = {"_blocks": kept["_blocks"], "_scales": kept["_scales"][:, 1:].contiguous()}
    for parts, refusal in (
        ({"_blocks": kept["_blocks"]}, "down_proj_scales is missing"),
        ({"_scales": kept["_scales"]}, "down_proj_blocks is missing"),
        (short, r"MXFP4 has \[N, O, G, 16\]"),
    ):
        own = {f"{name}{part}": values for part, values in parts.items()}
        save_file(tensors | own, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=refusal):
            load_model(tmp_path, DType.float32, CPU)


@pytest.mark.parametrize("stacked", [False, True])
def test_biases_of_experts(stacked):
    """As one tensor, which a GPU has, and expert by expert."""
    torch.manual_seed(0)
    experts = torch.tensor([[2, 0], [0, 3], [3, 2], [2, 3]])
    factory = WeightFactory(dtype=torch.float32, device=CPU, packing=False, stacked=stacked)
    product = GroupedLinear(4, 6, 5, factory, bias=True)
    weights, biases, x = torch.randn(4, 5, 6), torch.randn(4, 5), torch.randn(4, 6)
    for expert in range(4):
        product.weight_rows(expert, 0, 5).write(weights[expert])
        product.bias_rows(expert, 0, 5).write(biases[expert])
    found = product(x, group_rows(experts, 4)).view(4, 2, 5)
    wanted = torch.einsum("ti,txoi->txo", x, weights[experts]) + biases[experts]
    torch.testing.assert_close(found, wanted)


def test_malformed_fields_are_named(tmp_path):
    long = CONFIGS["phi3 long"].rope_parameters | {"long_factor": [1, 0, 2]}
    for name, changes, refusal in (
        ("granite", {"residual_multiplier": 0}, "residual_multiplier=0"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\]"),
        ("phi3", {"partial_rotary_factor": 1.5, "rope_parameters": None}, "partial_rotary.*1.5"),
        ("phi3 long", {"head_dim": 16}, "3 and 3 entries for 12"),
        ("phi3 long", {"rope_parameters": long}, "long_factor="),
    ):
        config = CONFIGS[name].to_dict() | {"architectures": [type(tiny_family(name)).__name__]}
        (tmp_path / "config.json").write_text(json.dumps(config | changes, default=str))
        with pytest.raises(CheckpointError, match=refusal):
            ModelSpec.read(tmp_path)
