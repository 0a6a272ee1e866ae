"""DeepSeek's family is what transformers computes, under the names it and checkpoints use."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from rollout.config import DType
from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.loader import load_model
from rollout.models.mtp.loader import MtpChain
from rollout.models.spec import ModelSpec, is_mtp_tensor
from tests.helpers.dense_attention import DenseAttention, features_of, logits_of
from tests.helpers.tiny_deepseek import (
    WITH_MTP,
    save_tiny_deepseek,
    save_with_mtp,
    tiny_deepseek,
)
from tests.helpers.transformers_answers import assert_logprobs, chosen_experts

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 11, 3, 70, 12, 9, 9, 41] * 5, [1], [96, 0, 2, 7]]
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "beta_fast": 3.0,
    "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, normed keys, no groups": (
        "glm4_moe",
        {
            "use_qk_norm": True, "attention_bias": False, "n_group": 1, "topk_group": 1,
            "head_dim": 20, "partial_rotary_factor": 0.3, "norm_topk_prob": False,
            "first_k_dense_replace": 2, "num_experts_per_tok": 5, "num_key_value_heads": 6,
        },
    ),
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "deepseek_v3, as Moonlight": (
        "deepseek_v3",
        {
            "q_lora_rank": None, "attention_bias": True, "n_group": 1, "topk_group": 1,
            "rope_interleave": False, "num_attention_heads": 5, "num_key_value_heads": 5,
            "qk_nope_head_dim": 9, "v_head_dim": 13, "kv_lora_rank": 30, "qk_rope_head_dim": 6,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "deepseek_v2": ("deepseek_v2", {"rope_parameters": YARN | {"mscale_all_dim": 0.707}}),
    "deepseek_v2, as Lite": (
        "deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "v_head_dim": 7},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints by the name of their config, each made once."""
    made = {}

    def saved(name: str):
        if name not in made:
            family, changes = CONFIGS[name]
            made[name] = save_tiny_deepseek(tmp_path_factory.mktemp("model"), family, **changes)
        return made[name]

    return saved


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_logits(name, folder):
    family, changes = CONFIGS[name]
    theirs = tiny_deepseek(family, **changes)
    for packing in (True, False):
        model = load_model(folder(name), DType.auto, CPU, packing=packing)
        for prompt, ours in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
            expected = theirs(torch.tensor([prompt])).logits[0]
            assert (ours - expected).abs().max() < 1e-5 * expected.abs().max(), packing


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3, yarn", "deepseek_v2"])
def test_an_engines_logprobs_and_routes_are_those_of_transformers(name, folder):
    family, changes = CONFIGS[name]
    theirs = tiny_deepseek(family, **changes)
    params = SamplingParams(temperature=1.0, max_new_tokens=12, seed=5, routed_experts=True)
    engine = RolloutEngine.from_pretrained(
        folder(name), "none", chunk_len=7, dtype="float32", record_routes=True, num_threads=1
    )
    rollouts = engine.generate(PROMPTS, params)
    assert_logprobs(rollouts, theirs)
    for rollout in rollouts:
        ours = torch.from_numpy(rollout.routed_experts).long().sort(-1).values
        chosen = chosen_experts(theirs, rollout.prompt_ids + rollout.token_ids)
        assert torch.equal(ours, chosen[:-1].sort(-1).values)


@pytest.mark.parametrize("family", WITH_MTP)
@torch.inference_mode()
def test_mtp_modules_are_those_of_transformers(family, tmp_path):
    """Each reads the output of the one before and the token that follows."""
    theirs = tiny_deepseek(family)
    modules = save_with_mtp(tmp_path, theirs, count=2)
    target = load_model(tmp_path, DType.auto, CPU)
    chain = MtpChain.find(tmp_path, target.spec)
    steps = chain.load(target)
    assert chain.spec.features == AuxHiddenStates(final=True)
    tokens = torch.tensor(PROMPTS[0])
    ours = expected = steps[0].fuse(features_of(target, chain.spec.features, PROMPTS[0]))
    for step, module in zip(steps, modules, strict=True):
        tokens = tokens[1:]
        attention = DenseAttention([len(tokens)], target.spec.attention_scale)
        ours = step.forward(tokens, ours[:-1], attention.positions, attention)
        expected = output_of(module, theirs, tokens, expected[:-1])
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        logits = theirs.lm_head(expected)
        torch.testing.assert_close(step.logits(ours), logits, rtol=1e-4, atol=1e-3)
    stored = load_file(tmp_path / "model.safetensors")
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    own = {name for name in stored if is_mtp_tensor(name, 3, 2) and not name.endswith(copies)}
    loaders = {name: each for step in steps for name, each in step.weight_loaders().items()}
    assert {name for name, loader in loaders.items() if loader.required} == own
    for name in own:
        assert torch.equal(loaders[name].read(), stored[name]), name


def output_of(module, theirs, tokens_L, hidden_LE):
    """The output of transformers' module for hidden states and the tokens that follow them."""
    embedded, length = theirs.model.embed_tokens(tokens_L[None]), len(tokens_L)
    return module(
        embedded, hidden_LE[None],
        theirs.model.rotary_emb(embedded, torch.arange(length)[None]),
        torch.full((length, length), float("-inf")).triu(1)[None, None], None, None,
    )[0]  # fmt: skip


def spec_of(folder, family, **changes) -> ModelSpec:
    model = tiny_deepseek(family)
    model.config.architectures = [type(model).__name__]
    config = json.loads(model.config.to_json_string(use_diff=False)) | changes
    config = {name: value for name, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec.read(folder)


REFUSED = {
    "glm4_moe": [
        {"quantization_config": {"quant_method": "fp8"}}, {"scoring_func": "softmax"},
        {"index_topk": 2048}, {"rope_parameters": {"mrope_section": [1, 1, 1]}},
    ],
    "deepseek_v3": [
        {"num_key_value_heads": 2}, {"architectures": ["DeepseekV32ForCausalLM"]},
    ],
    "deepseek_v2": [
        {"norm_topk_prob": True}, {"topk_method": "noaux_tc"},
    ],
    "glm4_moe_lite": [{"first_k_dense_replace": 2}],
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_implemented_is_named(family, tmp_path):
    for changes in REFUSED[family]:
        with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
            spec_of(tmp_path, family, **changes)


def test_malformed_fields_are_named(tmp_path):
    for name, value in (
        ("n_routed_experts", 10), ("n_group", 9), ("topk_group", 4), ("num_experts_per_tok", 7),
        ("routed_scaling_factor", 0), ("norm_topk_prob", "absent"), ("n_shared_experts", 0),
        ("first_k_dense_replace", "absent"), ("n_group", 0),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=name):
            spec_of(tmp_path, "glm4_moe", **{name: value})
