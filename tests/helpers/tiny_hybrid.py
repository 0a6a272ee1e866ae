"""Random Qwen3-Next and Qwen3.5 models small enough for a test, as transformers saves them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

LAYER_TYPES = ("linear_attention", "linear_attention", "full_attention", "linear_attention")


def save_tiny_hybrid(folder: Path, family: str = "qwen3_5", **options: object) -> Path:
    """Write `tiny_hybrid` as a checkpoint; ``options`` are its."""
    tiny_hybrid(family, **options).save_pretrained(folder)
    return folder


def tiny_hybrid(
    family: str = "qwen3_5",
    *,
    layer_types: tuple[str, ...] = LAYER_TYPES,
    experts: bool = False,
    heads: tuple[int, int, int, int] = (4, 2, 2, 4),
    max_positions: int = 512,
    seed: int = 0,
    tied: bool = False,
) -> PreTrainedModel:
    """``family``: qwen3_5 or qwen3_next. ``experts``: sparse layers, in Qwen3-Next all but one.

    ``heads``: query and kv heads of attention, key and value heads of linear attention.
    ``tied``: the head is the embedding.
    """
    num_heads, num_kv_heads, key_heads, value_heads = heads
    values: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "max_position_embeddings": max_positions,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "layer_types": list(layer_types),
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "dtype": torch.float32,
    }
    sparse = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
    match family, experts:
        case "qwen3_next", _:
            values |= sparse | {"intermediate_size": 80}
            values["mlp_only_layers"] = [1] if experts else list(range(len(layer_types)))
            model: PreTrainedModel = Qwen3NextForCausalLM(Qwen3NextConfig(**values))
        case "qwen3_5", False:
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**values, intermediate_size=80))
        case "qwen3_5", True:
            model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**values, **sparse))
        case _:
            raise ValueError(family)
    randomise(model, seed=seed)
    return model.float().eval()


class TinyChain(nn.Module):
    """The MTP head that Qwen3-Next and Qwen3.5 checkpoints bring: one step, of their own parts."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = deepcopy(model.config)
        config.layer_types = ["full_attention"]
        if "mlp_only_layers" in config.to_dict():  # Qwen3-Next's: sparse where any layer is
            config.mlp_only_layers = [0] if 0 in config.mlp_only_layers else []
        layer, norm = type(model.model.layers[0]), type(model.model.norm)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.pre_fc_norm_embedding = norm(hidden, eps)
        self.pre_fc_norm_hidden = norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([layer(config, 0)])
        self.norm = norm(hidden, eps)
        randomise(self, seed=7)

    def forward(
        self, model: PreTrainedModel, tokens_L: torch.Tensor, hidden_LE: torch.Tensor
    ) -> torch.Tensor:
        """[L, E], what the head reads: ``tokens_L`` follow what the states have read."""
        embedded = self.pre_fc_norm_embedding(model.get_input_embeddings()(tokens_L))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden_LE)], dim=-1))[None]
        length = len(tokens_L)
        rotary = model.model.rotary_emb(x, torch.arange(length)[None])
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        return self.norm(self.layers[0](x, position_embeddings=rotary, attention_mask=mask))[0]


def save_tiny_chain(folder: Path, family: str = "qwen3_5", **options: object) -> TinyChain:
    """Write `tiny_hybrid` and its MTP head into one checkpoint; the head is returned."""
    model = tiny_hybrid(family, **options)
    model.save_pretrained(folder)
    chain = TinyChain(model).to(model.dtype).eval()
    stored = load_file(folder / "model.safetensors")
    stored |= {f"mtp.{name}": values for name, values in _one_by_one(chain.state_dict())}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return chain


def _one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts as published: not fused."""
    for name, values in tensors.items():
        at, is_fused, which = name.partition(".experts.")
        for expert, weight in enumerate(values if is_fused else ()):
            names = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
            for part, own in zip(names, weight.chunk(len(names)), strict=True):
                yield f"{at}.experts.{expert}.{part}.weight", own.contiguous()
        if not is_fused:
            yield name, values


@torch.no_grad()
def randomise(model: nn.Module, *, sharpness: float = 6.0, seed: int = 0) -> None:
    """Values that make every part of a model count; of the same names, the same values."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        fan_in = parameter.shape[-1] ** 0.5
        if name.endswith("embed_tokens.weight"):
            scale = 1.0 / fan_in if model.config.tie_word_embeddings else 1.0
            parameter.copy_(values * scale)
        elif name == "lm_head.weight":
            parameter.copy_(values * sharpness / fan_in)
        elif name.endswith("linear_attn.norm.weight"):
            parameter.copy_(1 + 0.2 * values)
        elif name.endswith("A_log"):
            parameter.copy_(values - 1)  # a memory of some tokens
        elif parameter.dim() == 1:  # zero-centred norms, dt_bias
            parameter.copy_(0.2 * values)
        else:
            parameter.copy_(values / fan_in)
