"""Random Qwen3-MoE models small enough for a test, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.helpers.tiny_hybrid import randomise
from tests.helpers.tiny_model import write_checkpoint


def save_tiny_moe(folder: Path, **options: object) -> Path:
    """Write `tiny_moe` as a checkpoint of single experts; ``options`` are its.

    Not by ``save_pretrained``, which in a process group writes on one rank alone.
    """
    model = tiny_moe(**options)
    model.config.architectures = [type(model).__name__]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        at, _, fused = name.rpartition(".")
        if not at.endswith(".experts"):
            tensors[name] = tensor
            continue
        parts = tensor.chunk(2, dim=1) if fused == "gate_up_proj" else [tensor]
        names = ["gate_proj", "up_proj"] if fused == "gate_up_proj" else [fused]
        for part, values in zip(names, parts, strict=True):
            for expert, each in enumerate(values):
                tensors[f"{at}.{expert}.{part}.weight"] = each.contiguous()
    config = json.loads(model.config.to_json_string(use_diff=False))
    return write_checkpoint(folder, config, tensors)


def tiny_moe(
    *,
    vocab_size: int = 97,
    num_layers: int = 3,
    dense_layers: tuple[int, ...] = (1,),
    num_experts: int = 7,
    experts_per_token: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    normalizes: bool = True,
    max_positions: int = 512,
    sharpness: float = 6.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """``sharpness`` scales the head: larger means fewer likely tokens, so drafts are accepted."""
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=80,
        moe_intermediate_size=24,
        num_hidden_layers=num_layers,
        mlp_only_layers=list(dense_layers),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        num_experts=num_experts,
        num_experts_per_tok=experts_per_token,
        norm_topk_prob=normalizes,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        eos_token_id=2,
        dtype=dtype,
    )
    model = Qwen3MoeForCausalLM(config)
    randomise(model, sharpness=sharpness, seed=seed)
    with torch.no_grad():
        for _name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # randomise makes norms for those that add one
                parameter.add_(1)
    return model.to(dtype).eval()
