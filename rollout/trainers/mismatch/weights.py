"""Which of a trainer's tensors the engine has otherwise, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from rollout.models.layers.weight_loader import WeightLoader, same_values
from rollout.trainers.mismatch.result import Cause, Suspect
from rollout.trainers.param_ref import Weight
from rollout.trainers.weight_source import weight_source

_LEFT = 0.1  # of an adapter's size: a larger rest of a difference has another cause


def differing_tensors(model: nn.Module, loaders: Mapping[str, WeightLoader]) -> Iterator[Suspect]:
    """A suspect for each tensor whose values differ after conversion to either side's dtype; one is
    read from the engine at a time. ``where`` is its checkpoint name."""
    source = weight_source(model)
    weights = source.weights()
    for bucket in source.buckets(weights):
        refs = [ref for weight in bucket for ref in weight.inputs]
        with source.gathered(refs) as tensors:
            values = dict(zip(refs, tensors, strict=True))
            for weight in bucket:
                inputs = [values[ref] for ref in weight.inputs]
                value = source.value(weight, inputs)
                yield from _of_tensor(weight, inputs, value, loaders.get(weight.name))
    sent = {weight.name for weight in weights}
    known = [loaders[name] for name in sent & loaders.keys()]
    sent |= {part for loader in known for part in (*loader.parts, str(loader.alias_of))}
    twins = dict(model.named_parameters(remove_duplicate=False))
    for name, loader in loaders.items():
        if not loader.required or name in sent:
            continue
        twin = next((value for key, value in twins.items() if key.endswith(name)), None)
        if twin is None or not same_values(twin.detach(), loader.read()):
            text = f"the engine has a {name} of its own, which the trainer has not, or ties"
            yield Suspect(Cause.MISSING_TENSOR, name, text)


def _of_tensor(
    weight: Weight, inputs: Sequence[torch.Tensor], value: torch.Tensor, loader: WeightLoader | None
) -> Iterator[Suspect]:
    name = weight.name
    if loader is None or tuple(value.shape) != loader.shape:
        yield Suspect(
            Cause.MISSING_TENSOR, name, f"the engine has no {name} of the trainer's shape"
        )
        return
    stored = loader.read()
    value = value.to(stored.device)
    if same_values(value, stored) or same_values(stored, value) or _rounded(value, stored):
        return
    scale = None if weight.combine is None else _adapter_scale(inputs[0], value, stored)
    if loader.alias_of is not None:
        text = f"{name} is tied to {loader.alias_of} in the engine, and the trainer's is another"
        yield Suspect(Cause.MISSING_TENSOR, name, text)
    elif scale is not None:
        how = "is not merged" if abs(scale) < 1e-3 else f"has {scale:.3g} of the trainer's scale"
        yield Suspect(Cause.ADAPTER, name, f"the adapter of {name} {how} in the engine")
    else:
        apart = (value.float() - stored.float()).abs().max().item()
        text = f"{name} differs by up to {apart:.3g}: the engine has not the trainer's weights"
        yield Suspect(Cause.STALE_WEIGHTS, name, text)


def _rounded(value: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether both may be one tensor in the two 16-bit dtypes, neither of which holds the other."""
    if {value.dtype, stored.dtype} != {torch.bfloat16, torch.float16}:
        return False
    return torch.allclose(value.float(), stored.float(), rtol=2**-7, atol=1e-7)


def _adapter_scale(base: torch.Tensor, merged: torch.Tensor, stored: torch.Tensor) -> float | None:
    """The engine's part of the adapter's addition; None where that does not explain its values."""
    base = base.to(stored.device).float()
    added, engine = merged.float() - base, stored.float() - base
    size = added.square().sum().item()
    scale = (engine * added).sum().item() / size if size else 0.0
    left = (engine - scale * added).norm().item()
    return scale if size and left <= _LEFT * size**0.5 else None
