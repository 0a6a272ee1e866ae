"""Which parameters a model's checkpoint tensors are made of."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from rollout.errors import InvalidInputError
from rollout.trainers.names import checkpoint_name
from rollout.trainers.param_ref import ParamRef, Weight


def weights_of(model: nn.Module, slots: Sequence[ParamRef]) -> list[Weight]:
    """What to stream of ``model``, adapters merged.

    Raises InvalidInputError for parameters that cannot be streamed, by name.
    """
    if (peft := sys.modules.get("peft")) is not None and _has_adapters(peft, model):
        from rollout.trainers.peft import merged_weights

        weights = merged_weights(model, slots)
    else:
        weights = [Weight(checkpoint_name(slot.name), (slot,)) for slot in slots]
    names: set[str] = set()
    for weight in weights:
        for slot in weight.inputs:
            _require_streamable(slot)
        if weight.name in names:
            raise InvalidInputError("model", weight.name, "two parameters have this name")
        names.add(weight.name)
    return weights


def _has_adapters(peft: object, model: nn.Module) -> bool:
    kinds = (peft.PeftModel, peft.tuners.tuners_utils.BaseTunerLayer)  # type: ignore[attr-defined]
    return any(isinstance(module, kinds) for module in model.modules())


def _require_streamable(slot: ParamRef) -> None:
    if not slot.dtype.is_floating_point:
        raise InvalidInputError(
            f"model.{slot.name}.dtype", slot.dtype, "quantized weights cannot be streamed"
        )
    if slot.parameter.is_meta:
        raise InvalidInputError(
            f"model.{slot.name}.device", "meta", "offloaded or unmaterialized: load it first"
        )
