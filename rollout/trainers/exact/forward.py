"""`exact_forward`: a transformers model whose forward has the engine's bits."""

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
from rollout.trainers.exact.modules import ExactAttention, ExactMlp, ExactNorm, Sequences
from rollout.trainers.exact.products import ExactLinear, OptimizerSteps, make_exact

ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

_MASKS = "specrollout_exact"
"""The attention implementation under which transformers hands masks on as they are."""

_KNOWN = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)
_UNCHANGED = ("DecoderLayer", "RotaryEmbedding", "ForCausalLM", "Model", "WordEmbedding",
    "Activation", "GELUTanh", "SparseMoeBlock")  # fmt: skip


@contextmanager
def exact_forward(model: nn.Module) -> Iterator[None]:
    """A context in which a model's logits are those of the engine, bit for bit.

    The engine must have the same weights, in the same dtype, and ``exact`` products on the same
    machine; gradients are those of the ordinary modules but for rounding. `token_logprobs` turns
    logits into the engine's logprobs. Parameters stay the trainer's; on a CPU a packed copy of the
    weights is kept beside them until the context ends.

    Args:
        model: a transformers model of `ARCHITECTURES`, or what wraps one (DeepSpeed's engine, DDP,
            FSDP). Batches may be padded on either side, with a mask, or packed, with
            positions; a batch of one may be a tree, with a mask of four dimensions.

    Raises UnsupportedModelError for another model and for a module that is not known,
    InvalidInputError for dropout, ExactnessError where this machine's products are not exact.
    """
    target = _unwrapped(model)
    steps = OptimizerSteps()
    forwards = _forwards(target, _spec_of(target), steps)
    _register_masks()
    attention = target.config._attn_implementation
    try:
        for module, forward in forwards.items():
            module.forward = forward
        target.config._attn_implementation = _MASKS
        with steps.counted():
            yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)
        target.config._attn_implementation = attention


def _unwrapped(model: Any) -> Any:
    from transformers import PreTrainedModel

    while not isinstance(model, PreTrainedModel):
        if hasattr(model, "get_base_model"):  # PEFT's
            model = model.get_base_model()
        elif hasattr(model, "module"):
            model = model.module
        else:
            break
    return model


def _spec_of(model: Any) -> ModelSpec:
    name = type(model).__name__.removeprefix("FSDP")  # FSDP2 derives a class
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"exact_forward: {name} is not one of {', '.join(ARCHITECTURES)}"
        )
    return ModelSpec.of(model.config.to_dict() | {"architectures": [name]})


def _forwards(
    model: nn.Module, spec: ModelSpec, steps: OptimizerSteps
) -> dict[Any, Callable[..., Any]]:
    """The forwards of all modules that compute."""
    sequences = Sequences(spec, next(model.parameters()).device)
    found: dict[Any, Callable[..., Any]] = {}
    linears: list[Linear] = []
    inside: tuple[str, ...] = ()  # prefixes of what LoRA layers hold
    name: str
    module: Any
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name.startswith(inside):
            continue
        if is_lora(module):
            found[module] = lora = ExactLora(module, name, steps)
            linears.append(lora.product.linear)
            inside = (*inside, f"{name}.")
        elif isinstance(module, nn.Linear):
            found[module] = product = ExactLinear.of(module, steps)
            linears.append(product.linear)
        elif kind.endswith("RMSNorm"):
            found[module] = ExactNorm(module, spec.rms_norm_eps, spec.norm_unit_offset)
        elif kind.endswith("MLP"):
            found[module] = ExactMlp(module, spec)
        elif kind.endswith("Attention"):
            if module.attention_dropout:
                raise InvalidInputError(
                    "attention_dropout", module.attention_dropout, "must be 0: rollouts have none"
                )
            found[module] = ExactAttention(module, module.layer_idx, sequences)
        elif kind.endswith("TopKRouter") and spec.experts is not None:
            found[module] = router = ExactRouter(module, spec.experts, spec.hidden_size, steps)
            linears.append(router.product.linear)
        elif kind.endswith("Experts") and spec.experts is not None:
            found[module] = experts = ExactExperts(module, spec.experts, spec.hidden_size, steps)
            linears += experts.linears()
        elif not (isinstance(module, _KNOWN) or kind.endswith(_UNCHANGED)):
            raise UnsupportedModelError(f"exact_forward: module {name} is a {kind}, not known")
    make_exact(linears)
    return found


def _register_masks() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def given(*, attention_mask: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
        return attention_mask

    if _MASKS not in ALL_MASK_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(_MASKS, given)
