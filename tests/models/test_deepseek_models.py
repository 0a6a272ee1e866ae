"""DeepSeek's family is what transformers computes, under the names it and checkpoints use."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from rollout.config import DType, MemoryConfig
from rollout.errors import CheckpointError, InvalidInputError, UnsupportedModelError
from rollout.memory.sizing import num_kv_slots
from rollout.models.aux_hidden_states import AuxHiddenStateCollector, AuxHiddenStates
from rollout.models.loader import load_model
from rollout.models.mtp.loader import MtpChain
from rollout.models.spec import ModelSpec, is_mtp_tensor
from spec_workers.draft_training.building import DraftKind, DraftShape
from tests.helpers.compared import numbers
from tests.helpers.dense_attention import DenseAttention, logits_of
from tests.helpers.tiny_deepseek import (
    OF_FAMILY,
    WITH_MTP,
    save_tiny_deepseek,
    save_with_mtp,
    tiny_deepseek,
)
from tests.helpers.tiny_draft import save_tiny_eagle1, save_tiny_eagle3

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


def theirs_of(name: str, **options):
    family, changes = CONFIGS[name]
    return tiny_deepseek(family, **changes, **options)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_logits(name, packing, folder):
    theirs = theirs_of(name)
    model = load_model(folder(name), DType.auto, CPU, packing=packing)
    for prompt, ours in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
        expected = theirs(torch.tensor([prompt])).logits[0]
        assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_an_engines_logprobs_and_routes_are_those_of_transformers(name, folder):
    """Through chunks, the prefix cache and decoding, with and without drafts, which change
    nothing."""
    theirs = theirs_of(name)
    params = SamplingParams(temperature=1.0, max_new_tokens=12, n=2, seed=5, routed_experts=True)
    options = {"dtype": "float32", "record_routes": True, "num_threads": 1}
    plain = RolloutEngine.from_pretrained(
        folder(name), "none", max_running=1, prefix_cache=False, **options
    ).generate(PROMPTS, params)
    for spec in ("ngram", "mtp") if CONFIGS[name][0] in WITH_MTP else ("ngram",):
        engine = RolloutEngine.from_pretrained(
            folder(name), spec, max_running=5, chunk_len=7,
            spec_options={"budget": "fixed", "min_probability": 0.0}, **options,
        )  # fmt: skip
        assert numbers(engine.generate(PROMPTS, params)) == numbers(plain)
        engine.check_integrity()
        assert spec == "ngram" or engine.metrics().drafted > 0
    chosen: list[torch.Tensor] = []
    for module in theirs.modules():
        if hasattr(module, "top_k"):
            module.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
    for rollout in plain:
        chosen.clear()
        tokens = rollout.prompt_ids + rollout.token_ids
        logprobs = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = logprobs[len(rollout.prompt_ids) - 1 : -1]
        expected = expected.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=1e-4, atol=1e-4)
        ours = torch.from_numpy(rollout.routed_experts).long().sort(-1).values
        assert torch.equal(ours, torch.stack(chosen, dim=1)[:-1].sort(-1).values)


@pytest.mark.parametrize("family", WITH_MTP)
@torch.inference_mode()
def test_an_mtp_module_is_that_of_transformers(family, tmp_path):
    theirs = tiny_deepseek(family)
    (module,) = save_with_mtp(tmp_path, theirs)
    target = load_model(tmp_path, DType.auto, CPU)
    chain = MtpChain.find(tmp_path, target.spec)
    (step,) = chain.load(target)
    assert chain.spec.features == AuxHiddenStates(final=True)
    tokens = torch.tensor(PROMPTS[0])
    length = len(tokens) - 1
    taps = AuxHiddenStateCollector(chain.spec.features, len(tokens), 44, torch.empty(0))
    attention = DenseAttention([len(tokens)], target.spec.attention_scale)
    target.forward(tokens, attention.positions, attention, taps)
    hidden = step.fuse(taps.features_TF)[:-1]
    attention = DenseAttention([length], target.spec.attention_scale)
    ours = step.forward(tokens[1:], hidden, attention.positions, attention)
    expected = output_of(module, theirs, tokens[1:], hidden)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step.logits(ours), theirs.lm_head(expected), rtol=1e-4, atol=1e-3)
    stored = load_file(tmp_path / "model.safetensors")
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    own = {name for name in stored if is_mtp_tensor(name, 3, 1) and not name.endswith(copies)}
    weight_loaders = step.weight_loaders()
    assert {name for name, loader in weight_loaders.items() if loader.required} == own
    for name in own:
        assert torch.equal(weight_loaders[name].read(), stored[name]), name


def output_of(module, theirs, tokens_L, hidden_LE):
    """The output of transformers' module for hidden states and the tokens that follow them."""
    embedded, length = theirs.model.embed_tokens(tokens_L[None]), len(tokens_L)
    return module(
        embedded, hidden_LE[None],
        theirs.model.rotary_emb(embedded, torch.arange(length)[None]),
        torch.full((length, length), float("-inf")).triu(1)[None, None], None, None,
    )[0]  # fmt: skip


@pytest.mark.parametrize("family", WITH_MTP)
@torch.inference_mode()
def test_a_chain_of_several_modules(family, tmp_path):
    """Each reads the output of the one before and the token that follows; a step of their own each
    changes no bit."""
    theirs = tiny_deepseek(family)
    modules = save_with_mtp(tmp_path, theirs, count=3)
    target = load_model(tmp_path, DType.auto, CPU)
    steps = MtpChain.find(tmp_path, target.spec).load(target)
    tokens = torch.tensor(PROMPTS[0])
    random = torch.Generator().manual_seed(4)
    ours = expected = torch.randn(len(tokens), 44, generator=random)
    for step, module in zip(steps, modules, strict=True):
        tokens = tokens[1:]
        attention = DenseAttention([len(tokens)], target.spec.attention_scale)
        ours = step.forward(tokens, ours[:-1], attention.positions, attention)
        expected = output_of(module, theirs, tokens, expected[:-1])
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    params = SamplingParams(temperature=0.8, max_new_tokens=12, n=2, seed=5)
    options = {"dtype": "float32", "num_threads": 1}
    plain = RolloutEngine.from_pretrained(tmp_path, "none", **options).generate(PROMPTS, params)
    own = {"budget": "fixed", "min_probability": 0.0, "topk": 2, "num_draft_tokens": 12}
    engine = RolloutEngine.from_pretrained(
        tmp_path, "mtp", chunk_len=7, spec_options=own, **options
    )
    assert numbers(engine.generate(PROMPTS, params)) == numbers(plain)
    assert len(engine.worker.drafter.runners) == len(modules)
    assert engine.metrics().drafted > 0
    engine.check_integrity()


@pytest.mark.parametrize("save", [save_tiny_eagle1, save_tiny_eagle3])
def test_an_eagle_draft_on_glm_moe(save, folder, tmp_path):
    target = folder("glm4_moe")
    draft = save(tmp_path, target)
    params = SamplingParams(temperature=0.8, max_new_tokens=12, n=2, seed=5)
    options = {"dtype": "float32", "num_threads": 1}
    plain = RolloutEngine.from_pretrained(target, "none", **options).generate(PROMPTS, params)
    own = {"budget": "fixed", "min_probability": 0.0, "topk": 2, "draft_path": str(draft)}
    engine = RolloutEngine.from_pretrained(
        target, "eagle", chunk_len=7, max_running=4, spec_options=own, **options
    )
    assert numbers(engine.generate(PROMPTS, params)) == numbers(plain)
    assert engine.metrics().drafted > 0
    engine.check_integrity()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
@pytest.mark.parametrize("family", OF_FAMILY)
def test_every_tensor_reads_back_as_it_was_written(family, packing, dtype, tmp_path):
    """A router's weight and bias are in float32."""
    model = load_model(save_tiny_deepseek(tmp_path, family), dtype, CPU, packing=packing)
    stored = load_file(tmp_path / "model.safetensors")
    weight_loaders = model.weight_loaders()
    required = {name for name, loader in weight_loaders.items() if loader.required}
    assert required == {name for name in stored if not is_mtp_tensor(name, 3, 1)}
    for name in required:
        kept = torch.float32 if ".mlp.gate." in name else model.dtype
        assert torch.equal(weight_loaders[name].read(), stored[name].to(kept)), name
    num_bytes = sum(weight_loaders[name].read().nbytes for name in required)
    assert model.release() >= num_bytes
    model.allocate()


@pytest.mark.parametrize("family", OF_FAMILY)
@torch.inference_mode()
def test_half_precision_errs_no_more_than_transformers_does(family, tmp_path):
    sizes = {"hidden_size": 48, "moe_intermediate_size": 24}  # torch's grouped product aligns rows
    exact = tiny_deepseek(family, sharpness=1.0, **sizes)
    exact.save_pretrained(tmp_path)
    model = load_model(tmp_path, DType.bfloat16, CPU)
    theirs = tiny_deepseek(family, sharpness=1.0, **sizes).to(torch.bfloat16)
    for name, bias in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.data = exact.get_buffer(name)
    tokens = torch.tensor([PROMPTS[0]])
    truth = exact(tokens).logits[0]
    their_error = (theirs(tokens).logits[0].float() - truth).abs().mean()
    our_error = (logits_of(model, PROMPTS[:1])[0].float() - truth).abs().mean()
    assert our_error < 1.3 * their_error


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
        {"index_topk": 2048}, {"sliding_window": 128}, {"hidden_act": "gelu"},
        {"topk_method": "greedy"}, {"moe_layer_freq": 2}, {"rope_interleave": True},
        {"logit_scale": 0.5}, {"rope_parameters": {"mrope_section": [1, 1, 1]}},
        {"kv_lora_rank": 8},
    ],
    "deepseek_v3": [
        {"index_topk": 2048}, {"num_key_value_heads": 2}, {"partial_rotary_factor": 0.5},
        {"scoring_func": "softmax"}, {"quantization_config": {"quant_method": "fp8"}},
        {"architectures": ["DeepseekV32ForCausalLM"]},
    ],
    "deepseek_v2": [
        {"norm_topk_prob": True}, {"topk_method": "noaux_tc"}, {"mlp_bias": True},
        {"use_qk_norm": True}, {"rope_interleave": True},
    ],
    "glm4_moe_lite": [{"first_k_dense_replace": 2}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, changes) for family, all_changes in REFUSED.items() for changes in all_changes],
    ids=str,
)
def test_what_is_not_implemented_is_named_with_its_value(family, changes, tmp_path):
    ((name, value),) = changes.items()
    with pytest.raises(UnsupportedModelError) as error:
        spec_of(tmp_path, family, **changes)
    assert name in str(error.value)
    value = next(iter(value.values())) if isinstance(value, dict) else value
    value = value[0] if name == "architectures" else value
    assert str(value) in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_routed_experts": 10}, {"n_group": 9}, {"topk_group": 4}, {"num_experts_per_tok": 7},
        {"routed_scaling_factor": 0}, {"norm_topk_prob": "absent"}, {"n_shared_experts": 0},
        {"first_k_dense_replace": "absent"}, {"n_group": 0},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_fields_are_named(changes, tmp_path):
    ((name, _),) = changes.items()
    with pytest.raises(CheckpointError, match=name):
        spec_of(tmp_path, "glm4_moe", **changes)


@pytest.mark.parametrize(
    ("family", "changes", "numbers"),
    [
        ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 576),
        ("glm4_moe", {}, 2 * 2 * 12),
    ],
)
def test_a_tokens_kv_is_as_large_as_published(family, changes, numbers, tmp_path):
    spec = spec_of(tmp_path, family, num_hidden_layers=61, **changes)
    num_bytes = 2 * 61 * numbers
    slots = num_kv_slots(MemoryConfig(), spec, torch.bfloat16, CPU, 10 * num_bytes + 1)
    assert slots == 10


def test_rotary_frequencies_are_passed_over(tmp_path):
    spec = spec_of(tmp_path, "deepseek_v3")
    assert spec.passes_over("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not spec.passes_over("model.layers.0.self_attn.kv_b_proj.weight")


def test_no_draft_is_made_of_latent_attention(tmp_path):
    with pytest.raises(InvalidInputError, match=r"DeepseekV3ForCausalLM.*latent attention"):
        DraftShape(kind=DraftKind.eagle3).check_for(spec_of(tmp_path, "deepseek_v3"))
