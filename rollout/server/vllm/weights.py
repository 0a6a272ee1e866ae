"""New weights by vLLM's calls, which end in the transaction that sglang's do.

Tensors come through a group of torch.distributed that the trainer opened, or from a folder below
server.weights_root. vLLM's own communicator begins with a pickle, and its handles of CUDA memory
are pickles: both are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import Field, ValidationError

from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError
from rollout.server.body_fields import CHANGED, Body, Listed
from rollout.server.json_route import JsonAnswer, JsonRoute, request_error
from rollout.server.received_tensors import PerTensor
from rollout.server.serving import Serving
from rollout.server.sglang.control import Answer, change, refuse
from rollout.server.sglang.weight_bodies import DistributedBody, UpdateFields, Version
from rollout.server.sglang.weights import load_tensors, receive_tensors, weights_root

BodyType = TypeVar("BodyType", bound=Body)

_PACKED_BYTES = 2**30  # of vLLM's buffers
_NO_PICKLES = "is a pickle, which this server does not read: send tensors through a group"


class InitInfo(Body):
    """A group of torch.distributed to join from rank ``rank_offset`` on. Rank 0 sends."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str | None = Field(None, description="gloo or nccl: the trainer's, and required")
    group_name: str = "weight_update_group"
    timeout: float = 300.0
    packed: bool = False  # what updates do that do not say it
    packed_buffer_size_bytes: int = _PACKED_BYTES
    packed_num_buffers: int = 2  # unread: the sender's own


class InitBody(Body):
    init_info: InitInfo


class StartBody(UpdateFields):
    """An update of several calls, whose options belong here."""

    is_checkpoint_format: bool = True


class UpdateInfo(Body):
    """The tensors that the trainer broadcasts, in its order."""

    names: PerTensor[Listed[str]]
    dtype_names: PerTensor[Listed[str]]
    shapes: PerTensor[Listed[Listed[int]]]
    packed: bool | None = None  # joined to buffers of a GiB, as vLLM's senders do
    num_updates_list: PerTensor[Listed[int]] | None = Field(
        None, description="of a sparse update: the changed elements of each tensor, for each of "
        "which come places (int32) and values, by themselves",
    )  # fmt: skip
    is_checkpoint_format: bool = True
    group_name: str = "weight_update_group"
    ipc_handles: Any = None  # pickles, which are refused
    ipc_handles_pickled: Any = None

    def check_fields(self) -> None:
        """Raises InvalidInputError for what this server does not read."""
        _require_checkpoint_names(self.is_checkpoint_format)
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

    def announced(self) -> dict[str, Any]:
        """Names, dtypes and shapes of what is broadcast, in this order."""
        names, dtypes, shapes = self.names, self.dtype_names, self.shapes
        if self.num_updates_list is not None:
            names = [f"{name}:{kind}" for name in names for kind in ("elements", "values")]
            dtypes = [each for dtype in dtypes for each in ("int32", dtype)]
            shapes = [[count] for count in self.num_updates_list for _ in range(2)]
        return {"names": names, "dtypes": dtypes, "shapes": shapes}


class UpdateBody(UpdateFields):
    """``update_info``, or prime-rl's ``weight_dir``: a safetensors folder."""

    update_info: UpdateInfo | None = None
    weight_dir: str | None = None


class FinishBody(Body):
    weight_version: Version | None = None


class RpcBody(Body):
    """A method of SkyRL's workers."""

    method: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = None  # the update's own counts


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=JsonRoute)
    transfer = _Transfer(serving)

    @router.post("/init_weight_transfer_engine", responses=CHANGED)
    async def init_weight_transfer_engine(body: InitBody) -> JsonAnswer:
        """Join the trainer's group, instead of an earlier one; nothing is generated until all of
        its members have come."""
        return await transfer.join(body.init_info)

    @router.post("/shutdown_weight_transfer_engine", responses=CHANGED)
    async def shutdown_weight_transfer_engine(body: Body | None = None) -> JsonAnswer:
        """Leave the trainer's groups."""
        return await transfer.leave()

    @router.post("/start_weight_update", responses=CHANGED)
    async def start_weight_update(body: StartBody | None = None) -> JsonAnswer:
        """Open an update of several calls."""
        return await transfer.start(body or StartBody())

    @router.post("/update_weights", responses=CHANGED)
    async def update_weights(body: UpdateBody) -> JsonAnswer:
        """Take tensors of the open update; without one, an update of its own."""
        return await transfer.update(body)

    @router.post("/finish_weight_update", responses=CHANGED)
    async def finish_weight_update(body: FinishBody | None = None) -> JsonAnswer:
        """Commit."""
        return await transfer.finish(body or FinishBody())

    @router.post("/collective_rpc")
    async def collective_rpc(body: RpcBody) -> JsonAnswer:
        """The calls that SkyRL makes to its workers; there are no others."""
        answer = await transfer.call(body)
        return JsonAnswer({"results": [None]}) if answer.status_code == 200 else answer

    return router


class _Transfer:
    """One server's updates by vLLM's calls."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._root = weights_root(serving)
        self._joined: dict[str, bool] = {}  # by the group's name, whether its sender packs
        self._known_version = 0  # of the weights that the trainer has sent, or found as it joined

    async def join(self, info: InitInfo) -> JsonAnswer:
        if info.backend is None:
            wrong = InvalidInputError(
                "init_info.backend", None,
                "name the one of the trainer's torch.distributed group, gloo or nccl: this server "
                "does not speak vLLM's own communicator, which begins with a pickle",
            )  # fmt: skip
            return await refuse(self._serving, wrong)
        if info.packed_buffer_size_bytes != _PACKED_BYTES:
            wrong = InvalidInputError(
                "init_info.packed_buffer_size_bytes", info.packed_buffer_size_bytes,
                f"must be {_PACKED_BYTES}, vLLM's default",
            )  # fmt: skip
            return await refuse(self._serving, wrong)
        backend = info.backend

        def join(engine: Engine) -> Answer:
            if self._joined.pop(info.group_name, None) is not None:
                engine.destroy_weights_update_group(info.group_name)
            engine.init_weights_update_group(
                info.master_address.strip("[]"), info.master_port, info.rank_offset,
                info.world_size, info.group_name, backend, info.timeout, "torch",
            )  # fmt: skip
            self._joined[info.group_name] = info.packed
            self._note_version(engine)
            return {"message": "Weight transfer initialized"}

        return await change(self._serving, join)

    async def leave(self) -> JsonAnswer:
        def leave(engine: Engine) -> Answer:
            for name in list(self._joined):
                del self._joined[name]
                engine.destroy_weights_update_group(name)
            return {"message": "Weight transfer engine shut down"}

        return await change(self._serving, leave)

    async def start(self, body: StartBody) -> JsonAnswer:
        def begin(engine: Engine) -> Answer:
            _require_checkpoint_names(body.is_checkpoint_format)
            self._serving.open_update.begin(engine, None, body.options)
            return {"message": "Weight update started"}

        return await change(self._serving, begin)

    async def update(self, body: UpdateBody) -> JsonAnswer:
        info, folder = body.update_info, body.weight_dir
        try:
            if (info is None) == (folder is None):
                raise InvalidInputError("update_info", None, "give either it or weight_dir")
            if info is not None:
                info.check_fields()
        except InvalidInputError as error:
            return await refuse(self._serving, error)
        if info is not None:
            packed = (
                self._joined.get(info.group_name, False) if info.packed is None else info.packed
            )
            options = body.options
            if info.num_updates_list is not None:
                options.setdefault("base_version", self._known_version)
            announced = DistributedBody(
                **info.announced(), group_name=info.group_name,
                load_format="packed" if packed else None, **options,
            )  # fmt: skip
            return await receive_tensors(self._serving, announced, self._note_version)

        def read(engine: Engine, options: dict[str, Any]) -> None:
            assert folder is not None
            engine.update_weights_from_disk(self._root.folder("weight_dir", folder), **options)
            self._note_version(engine)

        return await load_tensors(self._serving, body.options, read)

    async def finish(self, body: FinishBody) -> JsonAnswer:
        def end(engine: Engine) -> Answer:
            self._serving.open_update.end(engine, body.weight_version)
            self._note_version(engine)
            return {"message": f"the weights are version {engine.weight_version}"}

        return await change(self._serving, end)

    def _note_version(self, engine: Engine) -> None:
        self._known_version = engine.weight_version

    async def call(self, body: RpcBody) -> JsonAnswer:
        if body.args:
            raise InvalidInputError("args", body.args, "SkyRL's calls have keyword arguments alone")
        match body.method:
            case "skyrl_start_weight_update":
                return await self.start(_validated(StartBody, body.kwargs))
            case "update_weights_nccl" | "update_weights_ipc":
                return await self.update(_validated(UpdateBody, body.kwargs))
            case "skyrl_finish_weight_update":
                return await self.finish(_validated(FinishBody, body.kwargs))
        raise InvalidInputError(
            "method", body.method,
            "must be skyrl_start_weight_update, update_weights_nccl or skyrl_finish_weight_update",
        )  # fmt: skip


def _require_checkpoint_names(is_checkpoint_format: bool) -> None:
    if not is_checkpoint_format:
        raise InvalidInputError(
            "is_checkpoint_format", False, "tensors come by the checkpoint's names and shapes"
        )


def _validated(model: type[BodyType], kwargs: Mapping[str, Any]) -> BodyType:
    try:
        return model.model_validate(kwargs)
    except ValidationError as error:
        raise request_error(error, "kwargs") from None
