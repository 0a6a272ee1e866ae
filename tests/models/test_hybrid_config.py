import json

import pytest
import torch

from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.hybrid_config import LinearAttentionSpec
from rollout.models.layers.rope import RopeType
from rollout.models.spec import ModelSpec

COMMON = {
    "head_dim": 256, "hidden_act": "silu", "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "full_attention_interval": 4,
    "attention_bias": False,
}  # fmt: skip
NEXT = COMMON | {
    "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "eos_token_id": 151645,
    "hidden_size": 2048, "intermediate_size": 5120, "linear_num_value_heads": 32,
    "mlp_only_layers": [*range(8)], "num_attention_heads": 16, "num_hidden_layers": 8,
    "num_key_value_heads": 2, "rope_scaling": None, "rope_theta": 10000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
TEXT = COMMON | {
    "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248044, "hidden_size": 5120,
    "intermediate_size": 17408, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 48, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 4,
    "num_key_value_heads": 4, "output_gate_type": "swish", "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip
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


def test_ropes_and_layers_as_a_config_may_say_them(tmp_path):
    for factor in (0.5, 1.0):
        assert read(tmp_path, NEXT, partial_rotary_factor=factor).rotary_dim == 256 * factor
        rope = TEXT["rope_parameters"] | {"partial_rotary_factor": factor}
        assert read(tmp_path, READING, rope_parameters=rope).rotary_dim == 256 * factor
    assert read(tmp_path, NEXT, partial_rotary_factor="absent").rotary_dim == 64
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 262144}
    spec = read(tmp_path, NEXT, rope_scaling=yarn)
    assert (spec.rope.rope_type, spec.rope.factor) == (RopeType.YARN, 2.0)
    spec = read(tmp_path, READING, layer_types=["full_attention"] * 4)
    assert spec.linear_attention is None
    assert spec.attention_layers == (0, 1, 2, 3)


NOT_IMPLEMENTED = [  # config, field, value
    (NEXT, "quantization_config", {"quant_method": "fp8"}),
    (READING, "attn_output_gate", False),
    (READING, "mtp_use_dedicated_embeddings", True),
    (READING, "layer_types", ["linear_attention"] * 4),
]
MALFORMED = [
    (READING, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4"),
    (READING, {"linear_num_value_heads": 40}, "linear_num_value_heads=40"),
    (NEXT, {"partial_rotary_factor": 2}, "partial_rotary_factor=2"),
    (NEXT, {"head_dim": 12}, "head_dim=12 has 3 dimensions"),
    (SEEING, {"text_config": []}, r"text_config=\[\]"),
]


def test_what_is_refused_is_named(tmp_path):
    for config, field, value in NOT_IMPLEMENTED:
        with pytest.raises(UnsupportedModelError, match=field):
            read(tmp_path, config, **{field: value})
    for config, changes, name in MALFORMED:
        with pytest.raises(CheckpointError, match=name):
            read(tmp_path, config, **changes)
