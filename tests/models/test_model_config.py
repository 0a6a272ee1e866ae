import json

import pytest
import torch

from rollout.errors import CheckpointError, InvalidInputError, UnsupportedModelError
from rollout.models.layers.rope import RopeType
from rollout.models.spec import ModelSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}  # fmt: skip


def read(folder, max_context_len=None, generation=None, **changes) -> ModelSpec:
    config = {name: value for name, value in (LLAMA | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelSpec.read(folder, max_context_len)


def test_plain_llama(tmp_path):
    spec = read(tmp_path, rope_theta=5e5, torch_dtype="bfloat16", tie_word_embeddings=True)
    assert (spec.vocab_size, spec.hidden_size, spec.ffn_size, spec.num_layers) == (97, 48, 80, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (6, 2, 8)
    assert (spec.rms_norm_eps, spec.max_context_len, spec.dtype) == (1e-5, 512, torch.bfloat16)
    assert spec.tied_embeddings
    biases = (spec.qkv_bias, spec.o_bias, spec.mlp_bias)
    assert (biases, spec.qk_norm) == ((False, False, False), False)
    assert (spec.rope.rope_type, spec.rope.rope_theta) == (RopeType.DEFAULT, 5e5)


def test_end_tokens_are_those_of_both_files(tmp_path):
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2,)
    for generation, wanted in (
        ({"eos_token_id": [7, 2]}, {2, 7}), ({"eos_token_id": 9}, {2, 9}), ({}, {2}),
    ):  # fmt: skip
        assert set(read(tmp_path, eos_token_id=2, generation=generation).eos_token_ids) == wanted


def test_rope_layouts_agree(tmp_path):
    params = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip
    new = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **params})
    for key in ("type", "rope_type"):
        old = read(tmp_path, rope_theta=5e5, rope_scaling={key: "llama3", **params})
        assert old == new
    assert read(tmp_path, rope_scaling=None, rope_theta=5e5).rope.rope_type is RopeType.DEFAULT


GRANITE_4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention"] * 2,
    "shared_intermediate_size": 80, "num_local_experts": 0, "position_embedding_type": "rope",
}  # fmt: skip


GEMMA_2, GEMMA_3 = ({"architectures": [f"Gemma{n}ForCausalLM"]} for n in (2, 3))
NOT_IMPLEMENTED: list[tuple[dict, str, str]] = [  # changes, what is named, the value
    ({"architectures": ["MambaForCausalLM"]}, "architectures", "MambaForCausalLM"),
    ({"architectures": "absent"}, "architectures", "None"),
    ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq"),
    ({"rope_interleaved": True}, "rope_interleaved", "True"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype", "float8"),
    ({"rope_scaling": {"type": "ntk", "factor": 2}}, "rope_type", "ntk"),
    ({"logits_scaling": 8.0}, "logits_scaling", "8.0"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers", "[1, 0]"),
    (GRANITE_4 | {"layer_types": ["mamba", "attention"]}, "layer_types", "mamba"),
    ({"swiglu_limit": 7.0}, "swiglu_limit", "7.0"),
    (GEMMA_2 | {"hidden_activation": "gelu"}, "hidden_activation", "gelu_pytorch_tanh"),
    ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section", "[1]"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention", ""),
    ({"sliding_window": 128}, "sliding_window", "max_context_len"),
]


def test_what_is_not_implemented_is_named_with_its_value(tmp_path):
    for changes, name, value in NOT_IMPLEMENTED:
        with pytest.raises(UnsupportedModelError) as error:
            read(tmp_path, **changes)
        assert name in str(error.value)
        assert value in str(error.value), name


MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}
USED = QWEN | {"use_sliding_window": True}
GEMMA = GEMMA_3 | {"num_hidden_layers": 7, "sliding_window": 9, "num_key_value_heads": 3}
NONE, BOTH = ((), None), ((0, 1), 128)


def test_layers_with_a_window(tmp_path):
    for changes, max_context_len, wanted in (
        (MISTRAL | {"sliding_window": 128}, None, BOTH),
        (MISTRAL | {"sliding_window": 128}, 128, ((0, 1), None)),
        (MISTRAL | {"sliding_window": 128}, 129, BOTH),
        (MISTRAL | {"max_position_embeddings": 8192}, None, ((0, 1), 4096)),
        (QWEN, None, NONE),
        (QWEN | {"use_sliding_window": False}, None, NONE),
        (USED | {"max_window_layers": 1}, None, ((1,), 128)),
        (USED | {"layer_types": ["sliding_attention"] * 2}, None, BOTH),
        ({"sliding_window": 512}, None, ((0, 1), None)),
        (GEMMA, None, ((0, 1, 2, 3, 4, 6), 9)),
    ):
        spec = read(tmp_path, max_context_len, **changes)
        assert (spec.local_layers, spec.window) == wanted, changes
        assert [spec.window_of(layer) for layer in wanted[0]] == [wanted[1]] * len(wanted[0])


def test_gemma_3_before_transformers_5(tmp_path):
    """Its ropes are three fields, its pattern a number."""
    ropes = {"rope_theta": 1e6, "rope_local_base_freq": 500.0,
             "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    changes = {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2}
    spec = read(tmp_path, **changes, **ropes)
    assert (spec.local_layers, spec.window) == ((0,), None)
    assert spec.rope_of(0).rope_theta == 500.0
    assert (spec.rope_of(1).rope_theta, spec.rope_of(1).factor) == (1e6, 8.0)
    assert (spec.head_dim, spec.tied_embeddings, spec.attention_scale) == (256, True, 1 / 16)


def test_malformed_fields_are_named(tmp_path):
    for changes, name in (
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_attention_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0}}, "factor"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ):
        with pytest.raises(CheckpointError, match=name):
            read(tmp_path, **changes)


def test_context_length_is_bounded_by_the_checkpoint(tmp_path):
    assert read(tmp_path, 100).max_context_len == 100
    with pytest.raises(InvalidInputError, match=r"max_context_len=513.*512"):
        read(tmp_path, 513)
    scaling = {"type": "linear", "factor": 2.0}
    assert read(tmp_path, 1024, rope_scaling=scaling).max_context_len == 1024
    assert read(tmp_path, rope_scaling=scaling).max_context_len == 512


def test_config_file_itself(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        ModelSpec.read(tmp_path)
    for text, reason in [("{", "not valid JSON"), ("[1]", "holds a list")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            ModelSpec.read(tmp_path)
