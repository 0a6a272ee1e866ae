"""The bodies of calls about weights, by vLLM's names and SkyRL's."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rollout.errors import InvalidInputError
from rollout.server.body_fields import Body, Listed
from rollout.server.received_tensors import PerTensor
from rollout.server.sglang.weight_bodies import UpdateFields, Version
from rollout.weights.distributed import GroupSource

_NO_PICKLES = "is a pickle, which this server does not read: send tensors through a group"
_GROUPS = (
    "name the backend of a torch.distributed group that the trainer opens (gloo or nccl), or bring "
    "weights in a folder: this server does not speak vLLM's own communicator"
)


class InitInfo(Body):
    """A group of torch.distributed to join from rank ``rank_offset`` on, whose rank 0 sends; or
    SkyRL's ``local_checkpoint_dir``, which is to follow the deltas that it publishes."""

    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int | None = None
    world_size: int | None = None
    backend: str | None = Field(None, description="gloo or nccl: the trainer's, and required")
    group_name: str = "weight_update_group"
    timeout: float = 300.0
    packed: bool = False  # what updates do that do not say it
    packed_buffer_size_bytes: int = Field(2**30, ge=1, lt=10**18)
    packed_num_buffers: int = 2  # unread: the sender's own
    nccl_unique_id_b64: Any = None  # refused
    local_checkpoint_dir: str | None = None
    # Unread, of SkyRL's deltas: checksums reveal another base, and files are read in our own way
    base_model_path: str | None = None
    cloud_download_workers: int | None = None
    checkpoint_load_format: str | None = None
    multi_thread_safetensors_max_workers: int | None = None

    def group(self) -> dict[str, Any]:
        """The arguments that join the group. Raises InvalidInputError for one of another kind."""
        if self.nccl_unique_id_b64 is not None:
            raise InvalidInputError("init_info.nccl_unique_id_b64", "...", _GROUPS)
        if self.backend is None:
            raise InvalidInputError("init_info.backend", None, _GROUPS)
        required = ("master_address", "master_port", "rank_offset", "world_size")
        given: dict[str, Any] = {name: getattr(self, name) for name in required}
        for name, value in given.items():
            if value is None:
                raise InvalidInputError(f"init_info.{name}", None, "a group needs it")
        given["master_address"] = given["master_address"].strip("[]")
        return given | {
            "group_name": self.group_name,
            "backend": self.backend,
            "timeout": self.timeout,
        }


class InitBody(Body):
    init_info: InitInfo


class StartBody(UpdateFields):
    """An update of several calls, whose options belong here."""

    is_checkpoint_format: bool = True


class UpdateInfo(Body):
    """The tensors that the trainer broadcasts, in its order; none: those that it named last for the
    same model. Or SkyRL's ``target_version``, which was fetched."""

    names: PerTensor[Listed[str]] = Field(default_factory=list)
    dtype_names: PerTensor[Listed[str]] = Field(default_factory=list)
    shapes: PerTensor[Listed[Listed[int]]] = Field(default_factory=list)
    packed: bool | None = None  # joined to buffers, as vLLM's senders do
    num_updates_list: PerTensor[Listed[int]] | None = Field(
        None, description="of a sparse update: the changed elements of each tensor, for each of "
        "which come places (int32) and values, by themselves",
    )  # fmt: skip
    is_checkpoint_format: bool = True
    group_name: str = "weight_update_group"
    ipc_handles: Any = None  # pickles, which are refused
    ipc_handles_pickled: Any = None
    target_version: Version | None = None
    version: Version | None = None  # unread: the same
    sync_dir: str | None = None  # unread, as `/fetch_weights` was told
    uri: str | None = None

    def check_fields(self) -> None:
        """Raises InvalidInputError for what this server does not read."""
        require_checkpoint_names(self.is_checkpoint_format)
        for name in ("ipc_handles", "ipc_handles_pickled"):
            if getattr(self, name) is not None:
                raise InvalidInputError(f"update_info.{name}", "...", _NO_PICKLES)
        counts = self.num_updates_list
        if counts is not None and not (len(counts) == len(self.names) == len(self.dtype_names)):
            raise InvalidInputError(
                "update_info.num_updates_list", len(counts),
                f"must have a number for each of {len(self.names)} names, as dtype_names has",
            )  # fmt: skip
        if counts is not None and self.packed:
            raise InvalidInputError("update_info.packed", True, "sparse updates are not packed")

    def source(self, load_format: str | None) -> GroupSource:
        """The tensors that the sender broadcasts, in order."""
        names, dtypes, shapes = self.names, self.dtype_names, self.shapes
        if self.num_updates_list is not None:
            names = [f"{name}:{kind}" for name in names for kind in ("elements", "values")]
            dtypes = [each for dtype in dtypes for each in ("int32", dtype)]
            shapes = [[count] for count in self.num_updates_list for _ in range(2)]
        return GroupSource(names, dtypes, shapes, self.group_name, load_format)


class UpdateBody(UpdateFields):
    """``update_info``, or prime-rl's ``weight_dir``: a safetensors folder."""

    update_info: UpdateInfo | None = None
    weight_dir: str | None = None


class FinishBody(Body):
    weight_version: Version | None = None


class FetchBody(Body):
    """A version that SkyRL has published in ``sync_dir``; its own folder is ``uri``."""

    target_version: Version
    sync_dir: str | None = None
    uri: str | None = None


def require_checkpoint_names(is_checkpoint_format: bool) -> None:
    """Raises InvalidInputError for tensors in vLLM's own names and shapes."""
    if not is_checkpoint_format:
        raise InvalidInputError(
            "is_checkpoint_format", False, "tensors come by the checkpoint's names and shapes"
        )
