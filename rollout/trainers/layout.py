"""Which parameters a model's checkpoint tensors are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rollout.errors import InvalidInputError
from rollout.trainers.names import checkpoint_name


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a trainer keeps one parameter: looked up anew each time, for wrappers swap tensors."""

    name: str  # as the model's own tree of modules names it
    module: nn.Module
    attribute: str
    shape: tuple[int, ...]  # of the whole parameter, however it is sharded
    dtype: torch.dtype

    @property
    def parameter(self) -> torch.Tensor:
        return getattr(self.module, self.attribute)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


Combine = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the checkpoint: its first input, changed by ``combine`` where there are more.

    The result has the shape and dtype of the first input. ``combine`` writes into no input.
    """

    name: str
    inputs: tuple[Slot, ...]
    combine: Combine | None = None


def slots_of(model: nn.Module) -> list[Slot]:
    """The model's parameters in its own order, tied ones once. Buffers are no weights."""
    return list(_slots(model))


def _slots(model: nn.Module) -> Iterator[Slot]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                name = f"{prefix}.{attribute}" if prefix else attribute
                # ZeRO-3 leaves an empty parameter and its shape beside it.
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                yield Slot(name, module, attribute, shape, parameter.dtype)


def weights_of(model: nn.Module, slots: Sequence[Slot]) -> list[Weight]:
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


def _require_streamable(slot: Slot) -> None:
    if not slot.dtype.is_floating_point:
        raise InvalidInputError(
            f"model.{slot.name}.dtype", slot.dtype, "quantized weights cannot be streamed"
        )
    if slot.parameter.is_meta:
        raise InvalidInputError(
            f"model.{slot.name}.device", "meta", "offloaded or unmaterialized: load it first"
        )
