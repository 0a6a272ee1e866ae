from itertools import cycle

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rollout.models.layers.rope import RopeSpec, cos_sin_table
from rollout.models.rope_config import context_limit, rope_fields, rope_spec

CPU = torch.device("cpu")
POSITIONS = 256
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
AT_64 = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_theta": 1e6},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "yarn": AT_64,
    "yarn untruncated": {
        "factor": 40.0, "original_max_position_embeddings": 128, "truncate": False,
        "beta_fast": 16, "beta_slow": 2,
    },
    "yarn mscale": {**AT_64, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn attention": {**AT_64, "attention_factor": 0.9},
    "longrope": AT_64,
}  # fmt: skip


@pytest.mark.parametrize(("name", "head_dim"), [*zip(ROPES, cycle((18, 64)), strict=False)])
def test_table_is_that_of_transformers(name, head_dim):
    params = {"rope_type": name.split()[0], "rope_theta": 10_000.0, **ROPES[name]}
    half = head_dim // 2
    if name == "longrope":
        params |= {"short_factor": [1.0] * half, "long_factor": [1.5 + a for a in range(half)]}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        rope_parameters=params,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(POSITIONS)[None])
    theirs = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    rope = rope_spec({"rope_parameters": params}, POSITIONS)
    ours = cos_sin_table(rope, head_dim, POSITIONS, CPU)
    assert ours.dtype == torch.float32
    # One unit of rounding in a frequency grows with the position it is multiplied by.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=POSITIONS * 1e-7)


def test_dynamic_base_is_that_of_the_longest_context_and_a_row_depends_on_its_position_alone():
    rope = rope_spec({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 64)
    within, beyond = (cos_sin_table(rope, 32, length, CPU) for length in (64, 128))
    default = cos_sin_table(RopeSpec(), 32, 64, CPU)
    torch.testing.assert_close(within, default, rtol=0, atol=0)
    assert not torch.allclose(beyond[:64], default, atol=1e-3)
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=1,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    )
    cos, _ = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(128)[None])
    torch.testing.assert_close(beyond[:, :16], cos[0, :, :16], rtol=0, atol=1e-5)


def test_context_limit():
    for params, limit in (
        ({}, 100),
        ({"rope_type": "linear", "factor": 2.5}, 250),
        ({"rope_type": "dynamic", "factor": 2.0}, 200),
        ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 10}, 100),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 100}, 400),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 25}, 100),
    ):
        assert context_limit(rope_spec({"rope_parameters": params}, 100), 100) == limit, params
    params = {"rope_type": "yarn", "original_max_position_embeddings": 25}
    assert rope_spec({"rope_parameters": params}, 100).factor == 4.0


def test_a_spec_written_as_config_reads_as_itself():
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 64, "beta_slow": 2.0}
    long = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    for scaling in (
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 64},
        yarn,
        long | {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]},
    ):
        spec = rope_spec({"rope_theta": 777.0, "rope_scaling": scaling}, 256)
        others = {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}
        config = others | rope_fields(spec, 256)
        assert rope_spec(config, config["max_position_embeddings"]) == spec, scaling
