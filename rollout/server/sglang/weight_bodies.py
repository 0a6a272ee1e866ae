"""The bodies of calls about weights, by sglang's names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rollout.server.body_fields import Body, Listed
from rollout.server.received_tensors import Handles, PerTensor
from rollout.weights.distributed import GroupSource
from rollout.weights.manifest import Manifest, TensorSpec, named_dtype
from rollout.weights.update_options import UpdateOptions

Version = Annotated[int, Field(ge=0, lt=2**63)]
"""The number of a weight version. Digits are taken."""


def _number(value: Any) -> Any:
    is_number = isinstance(value, str) and value.isascii() and value.isdigit()
    return int(value) if is_number else value


VersionName = Annotated[
    Version | Annotated[str, Field(min_length=1, max_length=256)], BeforeValidator(_number)
]
"""A weight version as sglang's clients name it: a number, or a label beside the number."""


class UpdateFields(Body):
    """The fields of `UpdateOptions`; None stands for its default."""

    selector: str | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: VersionName | None = None
    partial: bool | None = None
    base_version: Version | None = None
    lora_scaling: float | dict[str, float] | None = None
    check_finite: bool | None = None
    timeout: float | None = None
    torch_empty_cache: bool = False  # unread: /release_memory_occupation gives memory back

    @property
    def options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in UpdateOptions.__dataclass_fields__}
        return {name: value for name, value in given.items() if value is not None}


class TensorFields(UpdateFields):
    """The fields of a call that brings tensors."""

    load_format: str | None = None  # or direct


class TensorBody(TensorFields):
    """Tensors as texts, each one safetensors file in base64. Equal texts, as for several ranks,
    count once."""

    serialized_named_tensors: Listed[str] = Field(min_length=1)


class DiskBody(UpdateFields):
    """``model_path``: a safetensors folder that the server can read."""

    model_path: str
    load_format: str | None = None  # or auto, safetensors
    is_async: bool = False  # unread: the answer comes when the weights are in use
    token_step: int = 0  # unread: weight_version says which weights they are
    recapture_cuda_graph: bool = False  # unread: graphs read the weights where they are written


class DistributedBody(UpdateFields):
    """The tensors that a group's sender broadcasts, in its order."""

    names: PerTensor[Listed[str]]
    dtypes: PerTensor[Listed[str]]
    shapes: PerTensor[Listed[Listed[int]]]
    group_name: str = "weight_update_group"
    load_format: str | None = None  # or packed[:BYTES]

    @property
    def source(self) -> GroupSource:
        return GroupSource(self.names, self.dtypes, self.shapes, self.group_name, self.load_format)


class IpcBody(UpdateFields):
    """Handles of `SharedMemorySender` or `CudaIpcSender`, all valid at once."""

    handles: Handles = Field(min_length=1)


class AnnouncedTensor(Body):
    """The dtype and shape of a tensor to come."""

    dtype: str
    shape: list[int]


class BeginBody(UpdateFields):
    """``manifest``: all that is going to come, by name."""

    manifest: PerTensor[dict[str, AnnouncedTensor]] | None = None

    def announced(self) -> Manifest | None:
        """The manifest; None where nothing was announced."""
        if self.manifest is None:
            return None
        return {
            name: TensorSpec(
                tuple(tensor.shape), named_dtype(tensor.dtype, f"manifest.{name}.dtype")
            )
            for name, tensor in self.manifest.items()
        }


class AbandonBody(Body):
    reason: str = Field("abandoned by the caller", max_length=1000)


class GroupBody(Body):
    group_name: str = "weight_update_group"


class InitGroupBody(GroupBody):
    """A group to join, at rank ``rank_offset``. Rank 0 sends."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str = "nccl"
    timeout: float = 300.0


class TensorByName(Body):
    """``truncate_size``: the most rows to answer with."""

    name: str
    truncate_size: int = Field(100, ge=1, le=10**6)


class VersionBody(Body):
    """``new_version``: the name of the weights that are in use."""

    new_version: VersionName
    abort_all_requests: bool = True


class CheckerBody(Body):
    """``action``: checksum, snapshot, reset_tensors or compare. ``skip_tensor_list``: tensors whose
    names have one of these texts are left out, except from ``per_engine_checksum``."""

    action: str = "checksum"
    selector: str = "all"
    skip_tensor_list: Listed[str] | None = None
    allow_quant_error: bool = False  # unread: nothing is quantised on its way here
