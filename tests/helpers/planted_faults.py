"""Faults of a trainer's model, one for each cause of a mismatch with the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

HALF = "half_attention"


def _stale_weights(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(1.001)


def _missing_tensor(model: Any) -> None:
    """The head is tied to the embedding, or is its own, other than in the engine."""
    head, embedding = model.lm_head, model.model.embed_tokens.weight
    tied = head.weight is embedding
    head.weight = nn.Parameter(embedding.detach() * 1.5) if tied else embedding


def _adapter(model: Any) -> Any:
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    found = get_peft_model(model, config)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return found.eval()


def _rope(model: Any) -> None:
    for name, buffer in model.model.rotary_emb.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.9)


def _norm(model: Any) -> None:
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-4)


def _mask(model: Any) -> None:
    """The first layer's window is off by one, or there is one where there should be none."""
    attention = model.model.layers[0].self_attn
    window = (getattr(attention, "sliding_window", None) or 15) + 1

    def narrow(module: nn.Module, args: Any, kwargs: Any) -> Any:
        rows = torch.arange(kwargs["hidden_states"].shape[1])
        behind = rows[:, None] - rows
        kwargs["attention_mask"] = ((behind >= 0) & (behind < window))[None, None]
        return args, kwargs

    attention.register_forward_pre_hook(narrow, with_kwargs=True)


def _router(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = not module.norm_topk_prob


def _dtype(model: Any) -> None:
    model.to(torch.bfloat16)


def _logits(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output.bfloat16().float())


def _attention_implementation(model: Any) -> None:
    def half(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        given = (each.bfloat16() for each in (q, k, v))
        found, _ = sdpa_attention_forward(module, *given, mask, **options)
        return found.to(q.dtype), None

    AttentionInterface.register(HALF, half)
    AttentionMaskInterface.register(HALF, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = HALF


def _dropout(model: Any) -> None:
    model.train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1


def _nothing(model: Any) -> None:
    """The fault is in the rollouts, the padding, or nowhere but in rounding."""


FAULTS: dict[str, Callable[[Any], Any]] = {
    "stale_weights": _stale_weights,
    "missing_tensor": _missing_tensor,
    "adapter": _adapter,
    "rope": _rope,
    "positions": _nothing,
    "norm": _norm,
    "mask": _mask,
    "router": _router,
    "dtype": _dtype,
    "logits": _logits,
    "sampling": _nothing,
    "attention_implementation": _attention_implementation,
    "dropout": _dropout,
    "rounding": _nothing,
}


@contextmanager
def planted(cause: str, model: Any) -> Iterator[Any]:
    """The model with the fault of a cause."""
    yield FAULTS[cause](model) or model
