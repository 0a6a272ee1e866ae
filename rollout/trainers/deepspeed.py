"""Weights of a DeepSpeed engine, ZeRO-0 to ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine, PipelineEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param
from torch import distributed, nn

from rollout.errors import InvalidInputError
from rollout.parallel.partition import even_parts
from rollout.trainers.param_ref import ParamRef
from rollout.trainers.parameter_source import BUCKET_BYTES, ParameterSource
from rollout.trainers.ranks import TrainerRanks
from rollout.trainers.shard_exchange import FlatShard

_Masters = dict[int, Callable[[], torch.Tensor]]  # by id of the parameter


class DeepSpeedSource(ParameterSource):
    """Gathers the parameters of one bucket at a time; every rank takes part.

    ``dtype="float32"`` gives the optimizer's master copy of what is trained, and what is frozen in
    the model's own precision, cast. ``model`` is the engine, or the module inside it.

    Raises InvalidInputError for pipeline, tensor and expert parallelism, and where a master copy is
    asked for that cannot be reached.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        self.engine = model if isinstance(model, DeepSpeedEngine) else None
        if self.engine is not None:
            _require_data_parallel_alone(self.engine)
        super().__init__(model, bucket_bytes=bucket_bytes, dtype=dtype)
        self.ranks = TrainerRanks((self._group(),))
        self._unsharded = _unsharded_masters(self.engine)
        for ref in self.refs():
            if self._wants_master(ref.parameter) and not self._has_master(ref.parameter):
                raise InvalidInputError(
                    "dtype", "float32",
                    f"the optimizer's copy of {ref.name} is out of reach; ask for the model's own",
                )  # fmt: skip

    @contextmanager
    def gathered(self, refs: Sequence[ParamRef]) -> Iterator[list[torch.Tensor]]:
        parameters = [ref.parameter for ref in refs]
        masters = [
            self._master(parameter) if self._wants_master(parameter) else None
            for parameter in parameters
        ]
        # Parameters that ZeRO-3 keeps whole are left out: a gather would leave them sharded.
        sharded = [
            parameter
            for parameter, master in zip(parameters, masters, strict=True)
            if master is None and _is_sharded(parameter)
        ]
        with GatheredParameters(sharded, enabled=bool(sharded)):
            yield [
                parameter.detach() if master is None else master
                for parameter, master in zip(parameters, masters, strict=True)
            ]

    def flat_shard(self, ref: ParamRef) -> FlatShard | None:
        """ZeRO-3 gives each rank a range of a parameter's elements, which may end within a row."""
        parameter, size = ref.parameter, self.ranks.groups[0].size()
        own: Any = getattr(parameter, "ds_tensor", None)
        if not _is_sharded(parameter) or own.ds_numel != -(-ref.numel // size):
            return None  # whole on each rank, or split among fewer
        if own.status is not PartitionedParamStatus.AVAILABLE or hasattr(own, "ds_quant_scale"):
            return None  # on a disk, or quantized
        if self._wants_master(parameter):
            own = safe_get_local_fp32_param(parameter)
        held = even_parts(ref.numel, size)
        length = len(held[distributed.get_rank(self.ranks.groups[0])])
        return FlatShard(own.detach().reshape(-1)[:length], held)

    def gather_unit(self, ref: ParamRef) -> tuple[Hashable, int]:
        unit, size = super().gather_unit(ref)
        return unit, ref.numel * 4 if self._wants_master(ref.parameter) else size

    @property
    def step_applied(self) -> bool:
        return self.engine is None or self.engine.was_step_applied()

    def _group(self) -> torch.distributed.ProcessGroup:
        if self.engine is not None:
            return self.engine.seq_data_parallel_group
        for ref in self.refs():
            for attribute in ("ds_process_group", "_dp_group"):
                if hasattr(ref.parameter, attribute):
                    return getattr(ref.parameter, attribute)
        raise InvalidInputError("model", type(self.model).__name__, "no parameter of it is ZeRO's")

    def _wants_master(self, parameter: torch.Tensor) -> bool:
        """Whether float32 is asked for and the model holds less than its optimizer."""
        return (
            self.dtype is torch.float32
            and parameter.dtype is not torch.float32
            and parameter.requires_grad
        )

    def _has_master(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._unsharded or any(
            hasattr(parameter, attribute) for attribute in ("_z3_optimizer", "_hp_mapping")
        )

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole master copy of a parameter. A collective, except with ZeRO-0."""
        if id(parameter) in self._unsharded:
            return self._unsharded[id(parameter)]()
        master = safe_get_full_fp32_param(parameter)
        assert master is not None
        return master


def _is_sharded(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "ds_status", ZeroParamStatus.AVAILABLE) != ZeroParamStatus.AVAILABLE


def _unsharded_masters(engine: DeepSpeedEngine | None) -> _Masters:
    """ZeRO-0 in 16 bits keeps its master copies whole, in the optimizer alone."""
    optimizer = None if engine is None else engine.optimizer
    masters: _Masters = {}
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        for parameters, copies in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for index, parameter in enumerate(parameters):
                masters[id(parameter)] = _listed(copies, index)
    if isinstance(optimizer, FP16_Optimizer):
        flats = optimizer.fp32_groups_flat
        for group, parameters in enumerate(optimizer.fp16_groups):
            start = 0
            for parameter in parameters:
                masters[id(parameter)] = _flat_view(flats, group, start, parameter.shape)
                start += parameter.numel()
    return masters


def _listed(copies: Sequence[torch.Tensor], index: int) -> Callable[[], torch.Tensor]:
    return lambda: copies[index].detach()


def _flat_view(
    flats: Sequence[torch.Tensor], group: int, start: int, shape: torch.Size
) -> Callable[[], torch.Tensor]:
    return lambda: flats[group].detach().narrow(0, start, shape.numel()).view(shape)


def _require_data_parallel_alone(engine: DeepSpeedEngine) -> None:
    if isinstance(engine, PipelineEngine):
        raise InvalidInputError("model", "PipelineEngine", "pipeline parallelism is not supported")
    if engine.autotp_size() > 1:
        raise InvalidInputError(
            "model.autotp_size", engine.autotp_size(), "tensor parallelism is not supported"
        )
    if engine.has_moe_layers:
        raise InvalidInputError(
            "model.has_moe_layers", True, "DeepSpeed's expert parallelism is not supported"
        )


def prepare_deepspeed() -> None:
    """Call this before DeepSpeed is initialized: on a CPU it then compiles nothing for itself.

    It would compile ``deepspeed_shm_comm``, which only tensor-parallel inference uses; gloo does
    those collectives instead.
    """
    if get_accelerator().device_name() == "cpu":  # the only one that compiles it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
