"""Random models of DeepSeek's family small enough for a test, and their MTP module."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_layers import MtpLayer

from tests.helpers.tiny_hybrid import _one_by_one, randomise

CLASSES = {
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
}
COMMON = {
    "vocab_size": 97, "hidden_size": 44, "intermediate_size": 72, "moe_intermediate_size": 20,
    "num_hidden_layers": 3, "num_attention_heads": 6, "n_routed_experts": 9, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "routed_scaling_factor": 1.8, "n_group": 3, "topk_group": 2,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": None,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 18, "kv_lora_rank": 20, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8, "v_head_dim": 14,
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, object]] = {
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 12, "attention_bias": True},
    "deepseek_v3": _LATENT,
    "deepseek_v2": _LATENT
    | {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "hidden_size": 48},
    "glm4_moe_lite": _LATENT | {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1},
}
WITH_MTP = tuple(family for family in OF_FAMILY if family != "deepseek_v2")


def tiny_deepseek(
    family: str, *, sharpness: float = 6.0, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """A model of transformers; ``changes``: of its config."""
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**COMMON | OF_FAMILY[family] | changes))
    randomise(model, sharpness=sharpness, seed=seed)
    _raise_norms(model)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(torch.randn(bias.shape, generator=generator) * 0.3)
    return model.eval()


def save_tiny_deepseek(folder: Path, family: str, **options: object) -> Path:
    """Write `tiny_deepseek` as a checkpoint of single experts, with an MTP module but in V2."""
    model = tiny_deepseek(family, **options)
    if family in WITH_MTP:
        save_with_mtp(folder, model)
    else:
        model.save_pretrained(folder)
    return folder


def save_with_mtp(folder: Path, model: PreTrainedModel, count: int = 1) -> list[MtpLayer]:
    """Write a model and random MTP modules after its last layer; the modules are returned."""
    if count > 1:
        model.config.num_nextn_predict_layers = count
    model.save_pretrained(folder)
    decoder = model.model
    norm, depth = type(decoder.norm), model.config.num_hidden_layers
    stored = load_file(folder / "model.safetensors")
    modules = []
    for step in range(count):
        module = MtpLayer(model.config, type(decoder.layers[-1]), norm, depth - 1)
        randomise(module, seed=7 + step)
        _raise_norms(module)
        at = f"model.layers.{depth + step}"
        for name, values in _one_by_one(module.state_dict()):
            plain = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            stored[f"{at}.{plain}"] = values.contiguous()
        stored[f"{at}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        stored[f"{at}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
        modules.append(module.eval())
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return modules


@torch.no_grad()
def _raise_norms(module: torch.nn.Module) -> None:
    """`randomise` makes norms for models that add one."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.add_(1)
