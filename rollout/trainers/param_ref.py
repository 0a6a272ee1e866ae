"""References to a trainer's parameters, and the checkpoint tensors that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rollout.weights.wrapped_names import WRAPPING

# A router's bias is moved by rule and not by gradients (DeepSeek-V3, section 2.1.2).
_WEIGHT_BUFFERS = frozenset({"e_score_correction_bias"})


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a chain of FSDP1, compile and checkpoint wrappers, or the module itself."""
    while True:
        inner = next((child for name, child in module.named_children() if name in WRAPPING), None)
        if inner is None:
            return module
        module = inner


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A reference to one parameter of a trainer, or to a buffer that is a weight too, looked up
    anew each time: wrappers swap tensors."""

    name: str  # as the model's own tree of modules names it
    module: nn.Module
    attribute: str
    shape: tuple[int, ...]  # of the whole parameter, however it is sharded
    dtype: torch.dtype

    @property
    def parameter(self) -> torch.Tensor:
        """The tensor that is there now, sharded or not."""
        return getattr(self.module, self.attribute)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


Combine = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the checkpoint: its first input, changed by ``combine`` if there is one.

    Without it the other inputs are in the first already. The result has the shape and dtype of the
    first input. ``combine`` writes into no input.
    """

    name: str
    inputs: tuple[ParamRef, ...]
    combine: Combine | None = None


def param_refs(model: nn.Module) -> list[ParamRef]:
    """The model's parameters in its own order, tied ones once, and the buffers that are weights in
    a published checkpoint. No other buffer is one."""
    refs: list[ParamRef] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        buffers = [
            named for named in module.named_buffers(recurse=False) if named[0] in _WEIGHT_BUFFERS
        ]
        for attribute, parameter in [*module.named_parameters(recurse=False), *buffers]:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                name = f"{prefix}.{attribute}" if prefix else attribute
                # ZeRO-3 leaves an empty parameter and its shape beside it.
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                refs.append(ParamRef(name, module, attribute, shape, parameter.dtype))
    return refs
