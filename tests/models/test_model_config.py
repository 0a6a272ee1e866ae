import json

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from rollout.errors import CheckpointError, InvalidInputError, UnsupportedModelError
from rollout.models.deepseek_config import FAMILY, LATENT
from rollout.models.hybrid_config import HYBRIDS
from rollout.models.layers.rope import RopeType
from rollout.models.loader import MODEL_CLASSES
from rollout.models.spec import ModelSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


OF_LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
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


@pytest.mark.parametrize(
    ("config_class", "biases", "qk_norm", "head_dim"),
    [
        (LlamaConfig, (False, False, False), False, 12),
        (MistralConfig, (False, False, False), False, 12),
        (Qwen2Config, (True, False, False), False, 12),
        (Qwen3Config, (False, False, False), True, 128),
    ],
)
def test_families_as_transformers_saves_them(config_class, biases, qk_norm, head_dim, tmp_path):
    config = config_class(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=300,
        dtype="float16",
    )
    config.architectures = [config_class.__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    spec = ModelSpec.read(tmp_path)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == biases
    assert (spec.qk_norm, spec.head_dim, spec.dtype) == (qk_norm, head_dim, torch.float16)


def test_every_readable_architecture_has_a_class(tmp_path):
    for name in MODEL_CLASSES:
        changes = {"layer_types": ["linear_attention", "full_attention"]} if name in HYBRIDS else {}
        changes |= {"architectures": [name], "sliding_window": None, "num_experts": 0}
        if name in FAMILY:
            changes |= {"first_k_dense_replace": 2}
        if name in LATENT:
            changes |= OF_LATENT
        if name == "Glm4MoeLiteForCausalLM":
            changes |= {"mlp_layer_types": ["dense", "dense"]}
        assert read(tmp_path, **changes).architecture == name


@pytest.mark.parametrize("generation", [None, {"eos_token_id": [7, 2]}, {"eos_token_id": 9}, {}])
def test_end_tokens_are_those_of_both_files(generation, tmp_path):
    spec = read(tmp_path, eos_token_id=2, generation=generation)
    extra = (generation or {}).get("eos_token_id", [])
    assert set(spec.eos_token_ids) == {2, *(extra if isinstance(extra, list) else [extra])}


def test_rope_layouts_agree(tmp_path):
    params = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip
    new = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **params})
    for key in ("type", "rope_type"):
        old = read(tmp_path, rope_theta=5e5, rope_scaling={key: "llama3", **params})
        assert old == new
    assert read(tmp_path, rope_scaling=None, rope_theta=5e5).rope.rope_type is RopeType.DEFAULT


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ("architectures", "MambaForCausalLM")),
        ({"architectures": "absent"}, ("architectures", "None")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_interleaved": True}, ("rope_interleaved", "True")),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, ("dual_chunk", "chunk_size")),
        ({"torch_dtype": "float8_e4m3fn"}, ("dtype", "float8")),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, ("rope_type", "longrope")),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, ("mrope_section", "[1]")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("full_attention",)),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ("partial_rotary_factor", "0.25")),
        ({"layer_types": ["full_attention", "linear_attention"]}, ("layer_types", "linear")),
        ({"sliding_window": 128}, ("sliding_window", "128", "max_context_len")),
    ],
)
def test_what_is_not_implemented_is_named_with_its_value(changes, names, tmp_path):
    with pytest.raises(UnsupportedModelError) as error:
        read(tmp_path, **changes)
    for name in names:
        assert name in str(error.value)


MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}


@pytest.mark.parametrize(
    ("changes", "max_context_len", "served"),
    [
        (MISTRAL | {"sliding_window": None}, None, True),
        (MISTRAL | {"sliding_window": 128}, None, False),
        (MISTRAL | {"sliding_window": 128}, 128, True),
        (MISTRAL | {"sliding_window": 128}, 129, False),
        (MISTRAL | {"max_position_embeddings": 8192}, None, False),  # 4096 where not said
        (QWEN, None, True),
        (QWEN | {"use_sliding_window": False}, None, True),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 2}, None, True),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 1}, None, False),
        (
            QWEN
            | {
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention"] * 2,
            },
            None,
            True,
        ),
    ],
)
def test_a_sliding_window_is_refused_only_where_it_hides_something(
    changes, max_context_len, served, tmp_path
):
    if served:
        read(tmp_path, max_context_len, **changes)
    else:
        with pytest.raises(UnsupportedModelError, match="sliding_window"):
            read(tmp_path, max_context_len, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "absent"},
        {"vocab_size": "97"},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 4},
        {"head_dim": 7},
        {"eos_token_id": "</s>"},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        {"rope_scaling": {"type": "dynamic", "factor": 0}},
    ],
    ids=str,
)
def test_malformed_fields_are_named(changes, tmp_path):
    ((field, value),) = changes.items()
    name = (
        "factor" if isinstance(value, dict) else field.replace("num_key", "num_attention_heads=6")
    )
    with pytest.raises(CheckpointError, match=name.split("=")[0]):
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
