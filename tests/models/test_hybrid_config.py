import json

import pytest
import torch

from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.hybrid_config import LinearAttentionSpec
from rollout.models.layers.rope import RopeType
from rollout.models.spec import ModelSpec

NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [*range(8)],
    "model_type": "qwen3_next",
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
TEXT = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
SEEING = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": True,
    "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
}
READING = TEXT | {"architectures": ["Qwen3_5ForCausalLM"]}


def read(folder, config, **changes) -> ModelSpec:
    config = {name: value for name, value in (config | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec.read(folder)


def test_qwen3_next(tmp_path):
    spec = read(tmp_path, NEXT)
    assert spec.linear_attention == LinearAttentionSpec(
        layers=(0, 1, 2, 4, 5, 6), num_key_heads=16, num_value_heads=32, key_dim=128,
        value_dim=128, conv_width=4, interleaved=True,
    )  # fmt: skip
    assert spec.linear_attention.channels == 8192
    assert spec.attention_layers == (3, 7)
    assert (spec.head_dim, spec.rotary_dim, spec.dtype) == (256, 64, torch.bfloat16)
    assert (spec.rope.rope_type, spec.rope.rope_theta) == (RopeType.DEFAULT, 1e7)
    assert (spec.qk_norm, spec.gated_attention, spec.norm_unit_offset) == (True,) * 3
    assert spec.decoder_names == ("model",)
    assert spec.experts is None


def test_qwen3_5_with_and_without_a_vision_tower(tmp_path):
    sees, reads = read(tmp_path, SEEING), read(tmp_path, READING)
    assert (sees.tied_embeddings, reads.tied_embeddings) == (True, False)
    assert sees.decoder_names == reads.decoder_names[::-1] == ("model.language_model", "model")
    for spec in (sees, reads):
        assert (spec.ffn_size, spec.rotary_dim, spec.eos_token_ids) == (17408, 64, (248044,))
        assert (spec.max_context_len, spec.dtype) == (262144, torch.bfloat16)
        assert spec.linear_attention.layers == (0, 1, 2)
        assert not spec.linear_attention.interleaved


def test_what_a_text_model_passes_over(tmp_path):
    spec = read(tmp_path, SEEING)
    for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight"):
        assert spec.passes_over(name)
    for name in ("model.language_model.norm.weight", "lm_head.weight", "vision.weight"):
        assert not spec.passes_over(name)


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_where_the_rotary_part_is_said(factor, tmp_path):
    assert read(tmp_path, NEXT, partial_rotary_factor=factor).rotary_dim == 256 * factor
    rope = TEXT["rope_parameters"] | {"partial_rotary_factor": factor}
    assert read(tmp_path, READING, rope_parameters=rope).rotary_dim == 256 * factor
    assert read(tmp_path, NEXT, partial_rotary_factor="absent").rotary_dim == 64


def test_without_recurrent_layers(tmp_path):
    spec = read(tmp_path, READING, layer_types=["full_attention"] * 4)
    assert spec.linear_attention is None
    assert spec.attention_layers == (0, 1, 2, 3)


def test_stretched_contexts(tmp_path):
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 262144}
    spec = read(tmp_path, NEXT, rope_scaling=yarn)
    assert (spec.rope.rope_type, spec.rope.factor) == (RopeType.YARN, 2.0)


@pytest.mark.parametrize(
    ("config", "changes", "names"),
    [
        (NEXT, {"quantization_config": {"quant_method": "fp8"}}, ("quantization_config", "fp8")),
        (READING, {"attn_output_gate": False}, ("attn_output_gate", "False")),
        (READING, {"output_gate_type": "sigmoid"}, ("output_gate_type", "sigmoid")),
        (READING, {"mtp_use_dedicated_embeddings": True}, ("mtp_use_dedicated_embeddings",)),
        (READING, {"layer_types": ["linear_attention"] * 4}, ("layer_types", "full_attention")),
        (
            READING,
            {"layer_types": ["sliding_attention"] + ["full_attention"] * 3},
            ("layer_types", "sliding_attention"),
        ),
        (READING, {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        (SEEING, {"architectures": ["Qwen3VLForConditionalGeneration"]}, ("architectures",)),
    ],
)
def test_what_is_not_implemented_is_named(config, changes, names, tmp_path):
    with pytest.raises(UnsupportedModelError) as error:
        read(tmp_path, config, **changes)
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("config", "changes", "name"),
    [
        (READING, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4"),
        (READING, {"linear_num_value_heads": 40}, "linear_num_value_heads=40"),
        (READING, {"linear_key_head_dim": 0}, "linear_key_head_dim=0"),
        (NEXT, {"partial_rotary_factor": 2}, "partial_rotary_factor=2"),
        (NEXT, {"head_dim": 12}, "head_dim=12 has 3 dimensions"),
        (SEEING, {"text_config": []}, r"text_config=\[\]"),
    ],
)
def test_malformed_fields_are_named(config, changes, name, tmp_path):
    with pytest.raises(CheckpointError, match=name):
        read(tmp_path, config, **changes)
