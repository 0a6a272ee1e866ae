"""Finds the source that can stream a trainer's model; `HFSource` is that of a whole model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from rollout.errors import InvalidInputError
from rollout.trainers.fsdp import FSDP1Source, FSDP2Source
from rollout.trainers.param_ref import ParamRef, unwrapped
from rollout.trainers.parameter_source import BUCKET_BYTES, ParameterSource
from rollout.trainers.ranks import TrainerRanks
from rollout.weights.wrapped_names import checkpoint_name


class HFSource(ParameterSource):
    """Streams the parameters themselves: nothing is gathered.

    Under DistributedDataParallel every rank takes part all the same, so that all learn of a
    failure; hand over its ``.module`` to stream from one rank alone.
    """

    @cached_property
    def ranks(self) -> TrainerRanks:
        wrappers = [m for m in self.model.modules() if isinstance(m, DistributedDataParallel)]
        return TrainerRanks([wrapper.process_group for wrapper in wrappers[-1:]])

    def gathered(self, refs: Sequence[ParamRef]) -> AbstractContextManager[list[torch.Tensor]]:
        return nullcontext([ref.parameter.detach() for ref in refs])


def weight_source(
    model: nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: str | torch.dtype | None = None,
) -> ParameterSource:
    """A source of the weights a trainer's forward runs with.

    ``model`` may be a DeepSpeed engine, FSDP1, FSDP2 (``fully_shard``), DistributedDataParallel,
    compiled, or plain, each with PEFT adapters inside or not. The arguments are those of
    `ParameterSource`.

    Raises InvalidInputError for what cannot be streamed: an unknown wrapper, adapters that cannot
    be merged, quantized or offloaded weights.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError("model", type(model).__name__, "must be a torch.nn.Module")
    if _is_deepspeed(model):
        from rollout.trainers.deepspeed import DeepSpeedSource

        _refuse_unknown_wrapper(getattr(model, "module", model))
        return DeepSpeedSource(model, bucket_bytes=bucket_bytes, dtype=dtype)
    _refuse_unknown_wrapper(model)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return FSDP1Source(model, bucket_bytes=bucket_bytes, dtype=dtype)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return FSDP2Source(model, bucket_bytes=bucket_bytes, dtype=dtype)
    return HFSource(model, bucket_bytes=bucket_bytes, dtype=dtype)


def _is_deepspeed(model: nn.Module) -> bool:
    """Whether the model is DeepSpeed's engine, or a module that engine has taken over."""
    if (deepspeed := sys.modules.get("deepspeed")) is None:
        return False
    return isinstance(model, deepspeed.DeepSpeedEngine) or any(
        hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")
        for parameter in model.parameters()
    )


def _refuse_unknown_wrapper(model: nn.Module) -> None:
    """Raise unless the wrappers around the transformers model are known."""
    inner = unwrapped(model)
    while isinstance(inner, (DistributedDataParallel, DataParallel, AveragedModel)):
        inner = unwrapped(inner.module)
    modeling = sys.modules.get("transformers.modeling_utils")
    for name, module in model.named_modules():
        if modeling is not None and isinstance(module, modeling.PreTrainedModel):
            # Prompt tuning leaves a base_model: refused, by its own name, with the other tuners.
            if checkpoint_name(name) not in ("", "base_model"):
                _refuse(model, name)
            return
    if [name for name, _ in inner.named_children()] == ["module"]:
        _refuse(inner, "module")


def _refuse(model: nn.Module, inner: str) -> None:
    raise InvalidInputError(
        "model", type(model).__name__, f"is a wrapper not known here; hand over its .{inner}"
    )
