"""Which of a trainer's tensors the engine has otherwise, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rollout.models.layers.weight_loader import WeightLoader, same_values
from rollout.trainers.mismatch.result import Cause, Suspect
from rollout.trainers.param_ref import Weight
from rollout.trainers.weight_source import weight_source

_NOT_THE_ADAPTERS = 0.1
"""Of an adapter's size: more that is left of a difference has another cause."""


def differing_tensors(model: nn.Module, loaders: Mapping[str, WeightLoader]) -> list[Suspect]:
    """A suspect for each tensor whose values differ after conversion to either side's dtype.

    One tensor at a time is read from the engine. ``where`` is its checkpoint name.
    """
    source = weight_source(model)
    weights = source.weights()
    found: list[Suspect] = []
    for bucket in source.buckets(weights):
        refs = [ref for weight in bucket for ref in weight.inputs]
        with source.gathered(refs) as tensors:
            values = dict(zip(refs, tensors, strict=True))
            for weight in bucket:
                inputs = [values[ref] for ref in weight.inputs]
                found += _of_tensor(weight, inputs, source.value(weight, inputs), loaders)
    sent = {weight.name for weight in weights}
    return found + list(_missing(model, sent, loaders))


def _of_tensor(
    weight: Weight,
    inputs: Sequence[torch.Tensor],
    value: torch.Tensor,
    loaders: Mapping[str, WeightLoader],
) -> Iterator[Suspect]:
    name, loader = weight.name, loaders.get(weight.name)
    if loader is None or tuple(value.shape) != loader.shape:
        yield Suspect(
            Cause.MISSING_TENSOR, name, f"the engine has no {name} of the trainer's shape"
        )
        return
    stored = loader.read()
    value = value.to(stored.device)
    if same_values(value, stored) or same_values(stored, value):
        return
    apart = (value.float() - stored.float()).abs().max().item()
    if loader.alias_of is not None:
        text = f"{name} is tied to {loader.alias_of} in the engine, and the trainer's is another"
        yield Suspect(Cause.MISSING_TENSOR, name, text)
    elif (
        weight.combine is not None
        and (scale := _adapter_scale(inputs[0], value, stored)) is not None
    ):
        how = "is not merged" if abs(scale) < 1e-3 else f"is scaled by {scale:.3g} of the trainer's"
        yield Suspect(Cause.ADAPTER, name, f"the adapter of {name} {how} in the engine")
    else:
        text = f"{name} differs by up to {apart:.3g}: the engine has not the trainer's weights"
        yield Suspect(Cause.STALE_WEIGHTS, name, text)


def _adapter_scale(base: torch.Tensor, merged: torch.Tensor, stored: torch.Tensor) -> float | None:
    """The engine's part of the adapter's addition; None where that does not explain its values."""
    added = merged.float() - base.to(merged.device).float()
    engine = stored.float() - base.to(stored.device).float()
    size = added.square().sum().item()
    scale = (engine * added).sum().item() / size if size else 0.0
    left = (engine - scale * added).norm().item()
    return scale if size and left <= _NOT_THE_ADAPTERS * size**0.5 else None


def _missing(model: Any, sent: set[str], loaders: Mapping[str, WeightLoader]) -> Iterator[Suspect]:
    """Tensors of the engine that the trainer has not, or ties to another."""
    twins = dict(model.named_parameters(remove_duplicate=False))
    covered = {part for name in sent if name in loaders for part in loaders[name].parts}
    covered |= {str(loaders[name].alias_of) for name in sent if name in loaders}
    for name, loader in loaders.items():
        if not loader.required or name in sent | covered:
            continue
        twin = next((value for key, value in twins.items() if key.endswith(name)), None)
        if twin is None or not same_values(twin.detach(), loader.read()):
            text = f"the engine has a {name} of its own, which the trainer has not, or ties"
            yield Suspect(Cause.MISSING_TENSOR, name, text)
