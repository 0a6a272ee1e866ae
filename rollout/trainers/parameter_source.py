"""ParameterSource: a trainer's parameters as the checkpoint tensors they make up."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Self

import torch
from torch import nn

from rollout.errors import InvalidInputError
from rollout.trainers.param_ref import ParamRef, Weight, param_refs
from rollout.trainers.ranks import TrainerRanks
from rollout.trainers.shard_exchange import FlatShard
from rollout.trainers.weight_stream import WeightStream
from rollout.weights.lora import LoraScaling
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.source import WeightTensors
from rollout.weights.wrapped_names import checkpoint_name


def weights_of(
    model: nn.Module, refs: Sequence[ParamRef], *, adapters_only: bool = False
) -> list[Weight]:
    """The weights to stream of ``model``, adapters merged, or alone.

    Every trained parameter is an input of one of them. Raises InvalidInputError, by name, for
    parameters that cannot be streamed, and for a trained one that would not be.
    """
    if (peft := sys.modules.get("peft")) is not None and _has_adapters(peft, model):
        from rollout.trainers.peft import adapter_weights, merged_weights

        weights = (adapter_weights if adapters_only else merged_weights)(model, refs)
    elif adapters_only:
        raise InvalidInputError("model", type(model).__name__, "has no adapters to stream")
    else:
        weights = [Weight(checkpoint_name(ref.name), (ref,)) for ref in refs]
    names: set[str] = set()
    for weight in weights:
        for ref in weight.inputs:
            _require_streamable(ref)
        if weight.name in names:
            raise InvalidInputError("model", weight.name, "two parameters have this name")
        names.add(weight.name)
    sent = {ref for weight in weights for ref in weight.inputs}
    for ref in refs:
        if ref.parameter.requires_grad and ref not in sent:
            field, remedy = "model", "activate its adapter, or freeze it"
            if adapters_only:
                field, remedy = "adapters_only", "set adapters_only=False, or freeze it"
            raise InvalidInputError(field, ref.name, f"is trained, but would not be sent: {remedy}")
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


BUCKET_BYTES = 512 * 2**20

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ParameterSource(WeightTensors):
    """A model's weights by their checkpoint names, whole, a bucket at a time.

    Args:
        model: what the trainer's forward runs.
        bucket_bytes: at most this many bytes of parameters are gathered at once, or one tensor
            where that alone is more (with its adapters, of a LoRA layer).
        dtype: None or ``"model"``: as the model holds them. ``"float32"``: the most precise there
            is, the optimizer's master copy where the trainer keeps one. Another: the model's, cast.

    Parameters are looked up anew in each pass, so adapters may be switched between two passes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
            raise InvalidInputError("bucket_bytes", bucket_bytes, "must be a positive integer")
        self.model = model
        self.bucket_bytes = bucket_bytes
        self.dtype = _dtype(dtype)
        self.adapters_only = False
        self.weights()  # refuses here what could not be streamed later

    @cached_property
    def ranks(self) -> TrainerRanks:
        """The trainer's ranks, which must iterate together."""
        return TrainerRanks()

    @property
    def step_applied(self) -> bool:
        """Whether the trainer's last step changed the weights, as far as the model can tell."""
        return True

    @abstractmethod
    def gathered(self, refs: Sequence[ParamRef]) -> AbstractContextManager[list[torch.Tensor]]:
        """The whole parameters of one bucket, detached, valid inside.

        All collectives happen on entering, or in the same order on every rank on leaving.
        """
        ...

    def flat_shard(self, ref: ParamRef) -> FlatShard | None:
        """The elements that this rank holds of a parameter, where each rank holds one range: slices
        of it can be sent from rank to rank. None for any other: it has to be gathered."""
        return None

    def refs(self) -> list[ParamRef]:
        return param_refs(self.model)

    def gather_unit(self, ref: ParamRef) -> tuple[Hashable, int]:
        return (id(ref.module), ref.attribute), ref.numel * ref.dtype.itemsize

    def stream_adapters_only(self) -> Self:
        """From now on stream LoRA's A and B and what is trained beside them, under PEFT's names.

        They are for an engine that has the trainer's base. Raises InvalidInputError for a model
        without adapters, and for adapters that are more than A, B, a bias and a scaling.
        """
        self.adapters_only = True
        self.weights()
        self._scaling()
        return self

    @property
    def lora_scaling(self) -> LoraScaling | None:
        """The factor of ``B @ A``; None where adapters come merged."""
        return self._scaling() if self.adapters_only else None

    def _scaling(self) -> LoraScaling:
        from rollout.trainers.peft import lora_scaling

        return lora_scaling(self.model, self.refs())

    def weights(self) -> list[Weight]:
        """The checkpoint's tensors, and the parameters each is made of."""
        return weights_of(self.model, self.refs(), adapters_only=self.adapters_only)

    def manifest(self) -> Manifest:
        """The names, shapes and dtypes that a pass which begins now will yield."""
        return self.manifest_of(self.weights())

    def manifest_of(self, weights: Iterable[Weight]) -> Manifest:
        return {
            weight.name: TensorSpec(weight.inputs[0].shape, self.dtype or weight.inputs[0].dtype)
            for weight in weights
        }

    def buckets(self, weights: Iterable[Weight]) -> Iterator[list[Weight]]:
        """Consecutive weights whose inputs are gathered together."""
        bucket: list[Weight] = []
        held: dict[Hashable, int] = {}
        for weight in weights:
            units = dict(self.gather_unit(ref) for ref in weight.inputs)
            own, *_ = units
            if bucket and own not in held and sum((held | units).values()) > self.bucket_bytes:
                yield bucket
                bucket, held = [], {}
            bucket.append(weight)
            held |= units
        if bucket:
            yield bucket

    def value(self, weight: Weight, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The checkpoint's tensor from its gathered inputs, in the dtype asked for."""
        if weight.combine is not None:
            if self.dtype is torch.float32:
                inputs = [tensor.float() for tensor in inputs]
            value = weight.combine(inputs)
        else:
            value = inputs[0]
        return value if self.dtype is None else value.to(self.dtype)

    def stream(self) -> WeightStream:
        """One pass, to be closed."""
        return WeightStream(self)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.stream()


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "model":
        return None
    known = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known not in _DTYPES.values():
        raise InvalidInputError("dtype", dtype, f"must be None, model, {', '.join(_DTYPES)}")
    return known
