"""Which parameters a model's checkpoint tensors are made of."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import nn

from rollout.errors import InvalidInputError
from rollout.trainers.names import checkpoint_name
from rollout.trainers.param_ref import ParamRef, Weight


def weights_of(model: nn.Module, refs: Sequence[ParamRef]) -> list[Weight]:
    """What to stream of ``model``, adapters merged.

    Raises InvalidInputError for parameters that cannot be streamed, by name.
    """
    if (peft := sys.modules.get("peft")) is not None and _has_adapters(peft, model):
        from rollout.trainers.peft import merged_weights

        weights = merged_weights(model, refs)
    else:
        weights = [Weight(checkpoint_name(ref.name), (ref,)) for ref in refs]
    names: set[str] = set()
    for weight in weights:
        for ref in weight.inputs:
            _require_streamable(ref)
        if weight.name in names:
            raise InvalidInputError("model", weight.name, "two parameters have this name")
        names.add(weight.name)
    return weights


def _has_adapters(peft: object, model: nn.Module) -> bool:
    kinds = (peft.PeftModel, peft.tuners.tuners_utils.BaseTunerLayer)  # type: ignore[attr-defined]
    return any(isinstance(module, kinds) for module in model.modules())


def _require_streamable(ref: ParamRef) -> None:
    if not ref.dtype.is_floating_point:
        raise InvalidInputError(
            f"model.{ref.name}.dtype", ref.dtype, "quantized weights cannot be streamed"
        )
    if ref.parameter.is_meta:
        raise InvalidInputError(
            f"model.{ref.name}.device", "meta", "offloaded or unmaterialized: load it first"
        )
