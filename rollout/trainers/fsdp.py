"""Weights of models sharded by torch: FSDP2 (``fully_shard``) and FSDP1."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from rollout.parallel.partition import even_parts, scaled
from rollout.trainers.param_ref import ParamRef, Weight, param_refs
from rollout.trainers.parameter_source import BUCKET_BYTES, ParameterSource
from rollout.trainers.ranks import TrainerRanks
from rollout.trainers.shard_exchange import FlatShard


class FSDP2Source(ParameterSource):
    """Gathers each DTensor of a bucket, however its mesh shards it; every rank takes part.

    Where one mesh of one dimension shards DTensors by their first dimension, as ``fully_shard``
    does by default, slices of them can be sent instead.

    Parameters come in the dtype in which they are sharded: the master copy where FSDP computes in
    a lower one.
    """

    @cached_property
    def _mesh(self) -> DeviceMesh:
        parameters = [ref.parameter for ref in self.refs()]
        meshes = [each.device_mesh for each in parameters if isinstance(each, DTensor)]
        return max(meshes, key=lambda mesh: mesh.ndim)

    @cached_property
    def ranks(self) -> TrainerRanks:
        return TrainerRanks(self._mesh.get_all_groups())

    def refs(self) -> list[ParamRef]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves parameters unsharded
        return param_refs(self.model)

    def flat_shard(self, ref: ParamRef) -> FlatShard | None:
        parameter = ref.parameter.detach()
        if not isinstance(parameter, DTensor) or len(self.ranks.groups) != 1:
            return None
        placement = parameter.placements[0]
        if parameter.device_mesh != self._mesh or type(placement) is not Shard or placement.dim:
            return None
        width = ref.numel // ref.shape[0] if ref.shape[0] else 0
        held = scaled(even_parts(ref.shape[0], self._mesh.size()), width)
        return FlatShard(parameter.to_local().reshape(-1), held)

    def gathered(self, refs: Sequence[ParamRef]) -> AbstractContextManager[list[torch.Tensor]]:
        return nullcontext([_whole(ref.parameter.detach()) for ref in refs])


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    device = parameter.device_mesh.device_type
    if parameter.device.type != device:  # offloaded: the group reduces tensors of its own device
        return parameter.to(device).full_tensor()  # type: ignore[attr-defined]
    return parameter.full_tensor()


class FSDP1Source(ParameterSource):
    """Summons one FSDP unit after another, as many at a time as a bucket holds.

    A unit larger than a bucket is a bucket. Every rank takes part. Parameters come in the dtype in
    which they are sharded, as with FSDP2.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        self._units: dict[tuple[int, str], FullyShardedDataParallel] = {}
        super().__init__(model, bucket_bytes=bucket_bytes, dtype=dtype)
        roots = FullyShardedDataParallel.fsdp_modules(model, root_only=True)
        groups = [roots[0].process_group, getattr(roots[0], "_inter_node_pg", None)]
        self.ranks = TrainerRanks([group for group in groups if group is not None])
        # An inner unit summoned before its root has ever run would take itself for a root.
        for root in roots:
            with _summoned(root):
                pass

    def refs(self) -> list[ParamRef]:
        """The parameters unit by unit. Shapes and owners come from the flat parameters: nothing is
        gathered."""
        refs: list[ParamRef] = []
        taken: set[tuple[int, str]] = set()
        self._units.clear()
        for prefix, module in self.model.named_modules():
            if not isinstance(module, FullyShardedDataParallel):
                continue
            if (handle := module._handle) is None:
                continue  # a unit whose parameters are all in units inside it
            flat = handle.flat_param
            taken |= {(id(info.module), info.param_name) for info in flat._shared_param_infos}
            for info, shape, name in zip(flat._param_infos, flat._shapes, flat._fqns, strict=True):
                owner = (id(info.module), info.param_name)
                taken.add(owner)
                self._units[owner] = module
                full_name = f"{prefix}.{name}" if prefix else name
                refs.append(
                    ParamRef(full_name, info.module, info.param_name, tuple(shape), flat.dtype)
                )
        unmanaged = [
            ref
            for ref in param_refs(self.model)
            if (id(ref.module), ref.attribute) not in taken and ref.attribute != "_flat_param"
        ]
        return refs + unmanaged

    def gather_unit(self, ref: ParamRef) -> tuple[Hashable, int]:
        unit = self._units.get((id(ref.module), ref.attribute))
        if unit is None or unit._handle is None:
            return super().gather_unit(ref)
        flat = unit._handle.flat_param
        return id(unit), flat._unpadded_unsharded_size.numel() * flat.dtype.itemsize

    @contextmanager
    def gathered(self, refs: Sequence[ParamRef]) -> Iterator[list[torch.Tensor]]:
        units = {
            id(unit): unit
            for ref in refs
            if (unit := self._units.get((id(ref.module), ref.attribute))) is not None
        }
        with ExitStack() as stack:
            for unit in units.values():
                stack.enter_context(_summoned(unit))
            yield [ref.parameter.detach() for ref in refs]

    def value(self, weight: Weight, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        value = super().value(weight, inputs)
        # A consumer's numpy() makes a storage unresizable, and the unit frees its own by resizing.
        return value.clone() if value.device.type == "cpu" else value


def _summoned(unit: FullyShardedDataParallel) -> AbstractContextManager[None]:
    return FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False)
