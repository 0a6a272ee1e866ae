"""`exact_forward`: a transformers model whose logits are the engine's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rollout.errors import InvalidInputError, UnsupportedModelError
from rollout.models.layers.linear import Linear
from rollout.models.spec import ModelSpec
from rollout.trainers.exact.experts import ExactExperts, ExactRouter
from rollout.trainers.exact.lora import ExactLora, is_lora
from rollout.trainers.exact.modules import ExactAttention, ExactMlp, ExactNorm
from rollout.trainers.exact.products import ExactLinear, make_exact
from rollout.trainers.exact.sequences import Sequences

ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MASKS = "specrollout_exact"
"""The attention implementation under which transformers hands masks on as they are."""

_UNCHANGED = {
    "DecoderLayer", "ForCausalLM", "Model", "RotaryEmbedding", "SparseMoeBlock", "TextModel",
    "TextScaledWordEmbedding",
}  # fmt: skip
"""Modules of an architecture, without its name, that compute nothing or what the engine does."""
_KNOWN = {"Embedding", "ModuleList", "SiLUActivation", "SiLU", "GELUTanh", "PytorchGELUTanh"}


@contextmanager
def exact_forward(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """A context in which a model's logits are those of the engine, bit for bit.

    The engine must have the same weights, in the same dtype, and ``exact`` products on the same
    machine; gradients are those of the ordinary modules but for rounding. `token_logprobs` turns
    logits into the engine's logprobs. Parameters stay the trainer's; on a CPU a packed copy is kept
    beside them until the context ends. Not for a model that several threads run, or that is copied
    or compiled meanwhile; the model's config is not to be used for another one.

    Args:
        model: a transformers model of `ARCHITECTURES`, or what wraps one (DeepSpeed's engine, DDP,
            FSDP2, PEFT). Batches may be padded on either side, with a mask, or packed, with
            positions; a batch of one may be a tree, with a mask of four dimensions. Always with
            ``use_cache=False``.
        dtype: that the forward computes in, of parameters that are cast for it; default: theirs.

    Raises UnsupportedModelError for another model and for a module that is not known,
    InvalidInputError for dropout, ExactnessError where this machine's products are not exact.
    """
    target = transformers_model(model)
    if _kind(target) not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"exact_forward: {_kind(target)} is not one of {', '.join(ARCHITECTURES)}"
        )
    forwards = _forwards(target, dtype or target.dtype)
    _register_masks()
    attention = target.config._attn_implementation
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        target.config._attn_implementation = _MASKS
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = own
        target.config._attn_implementation = attention


def transformers_model(model: Any) -> Any:
    """The transformers model inside wrappers (DeepSpeed's engine, DDP, PEFT), or what is inside of
    them where there is none."""
    from transformers import PreTrainedModel

    while not isinstance(model, PreTrainedModel):
        if hasattr(model, "get_base_model"):  # PEFT's
            model = model.get_base_model()
        elif hasattr(model, "module"):
            model = model.module
        else:
            break
    return model


def _kind(module: nn.Module) -> str:
    """The module's class; FSDP2 derives its own."""
    return type(module).__name__.removeprefix("FSDP")


def _forwards(model: Any, dtype: torch.dtype) -> dict[Any, Callable[..., Any]]:
    """The forwards of all modules that compute."""
    if dtype not in DTYPES:
        raise InvalidInputError("dtype", dtype, f"must be one of {DTYPES}")
    architecture = _kind(model)
    spec = ModelSpec.of(model.config.to_dict() | {"architectures": [architecture]})
    if spec.logit_soft_cap is not None:
        raise UnsupportedModelError(
            f"exact_forward: final_logit_softcapping={spec.logit_soft_cap} is not implemented"
        )
    sequences = Sequences(spec, next(model.parameters()).device)
    found: dict[Any, Callable[..., Any]] = {}
    linears: list[Linear] = []
    inside: tuple[str, ...] = ()  # prefixes of what LoRA layers hold
    name: str
    module: Any
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if is_lora(module):
            found[module] = lora = ExactLora(module, name, dtype)
            linears.append(lora.product.linear)
            inside = (*inside, f"{name}.")
            continue
        if isinstance(module, nn.Linear) and _kind(module) == "Linear":
            found[module] = product = ExactLinear.of(module, dtype)
            linears.append(product.linear)
            continue
        match _kind(module).removeprefix(architecture.removesuffix("ForCausalLM")):
            case "RMSNorm":
                found[module] = ExactNorm(module, spec.rms_norm_eps, spec.norm_unit_offset)
            case "MLP":
                found[module] = ExactMlp(module, spec)
            case "Attention":
                if module.attention_dropout:
                    raise InvalidInputError(
                        "attention_dropout", module.attention_dropout,
                        "must be 0: rollouts have none",
                    )  # fmt: skip
                found[module] = ExactAttention(module, module.layer_idx, sequences)
            case "TopKRouter" if spec.experts is not None:
                router = ExactRouter(module, spec.experts, spec.hidden_size, dtype)
                found[module] = router
                linears.append(router.product.linear)
            case part if part in _UNCHANGED or _kind(module) in _KNOWN or part == "Experts":
                pass
            case _:
                raise UnsupportedModelError(
                    f"exact_forward: module {name} is a {type(module).__name__}, not known"
                )
    for name, module in model.named_modules():
        if name.endswith(".experts") and spec.experts is not None:
            gate = found[model.get_submodule(f"{name.removesuffix('.experts')}.gate")]
            assert isinstance(gate, ExactRouter)
            found[module] = experts = ExactExperts(module, spec.experts, gate)
            linears += experts.linears()
    make_exact(linears)
    return found


def _register_masks() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def given(*, attention_mask: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
        return attention_mask

    if _MASKS not in ALL_MASK_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(_MASKS, given)
