"""The forward of PEFT's LoRA layers: a product with the merged weight that `RolloutHook` sends."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rollout.errors import InvalidInputError
from rollout.trainers.exact.products import ExactLinear
from rollout.weights.lora import lora_delta


def is_lora(module: object) -> bool:
    """Whether this is a LoRA layer around a linear module."""
    lora = sys.modules.get("peft.tuners.lora")
    return lora is not None and type(module) is lora.Linear


class ExactLora:
    """The forward of a LoRA layer with the adapters that are active."""

    def __init__(self, module: Any, name: str, dtype: torch.dtype) -> None:
        """Raises InvalidInputError for dropout, variants of LoRA, and an adapter's bias where the
        base has none."""
        for adapter, dropout in module.lora_dropout.items():
            if isinstance(dropout, torch.nn.Dropout):
                raise InvalidInputError(f"{name}.lora_dropout", dropout.p, "must be 0")
            if adapter in module.lora_variant or module.fan_in_fan_out:
                kind = type(module.lora_variant.get(adapter)).__name__
                raise InvalidInputError(name, kind, "exact training takes plain LoRA alone")
        if any(module.lora_bias.values()) and module.get_base_layer().bias is None:
            raise InvalidInputError(f"{name}.lora_bias", True, "its layer has no bias to add it to")
        self._module = module
        self.product = ExactLinear.of(module.get_base_layer(), dtype)

    def __call__(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        module = self._module
        base = module.get_base_layer()
        weight_OI, bias_O = base.weight, base.bias
        for adapter in () if module.disable_adapters else module.active_adapters:
            if adapter not in module.lora_A or adapter in module.merged_adapters:
                continue
            a, b, scaling = module.lora_A[adapter], module.lora_B[adapter], module.scaling[adapter]
            delta_OI = lora_delta(a.weight, b.weight, scaling)
            weight_OI = (weight_OI + delta_OI).to(base.weight.dtype)  # as a merge in place
            if b.bias is not None:
                bias_O = (bias_O + b.bias * scaling).to(base.bias.dtype)
        return self.product.apply(x, weight_OI, bias_O)
