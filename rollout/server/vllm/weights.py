"""New weights by vLLM's calls, which end in the transaction that sglang's do.

Tensors come through a group of torch.distributed that the trainer opened, or from a folder below
server.weights_root: prime-rl's, or the checkpoint that follows SkyRL's deltas. Refused by name are
vLLM's own communicator, whose members meet by a pickle or by NCCL's bare id, and its handles of
CUDA memory, which are pickles.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError
from rollout.server.body_fields import CHANGED, Body
from rollout.server.json_route import JsonAnswer, JsonRoute
from rollout.server.serving import Serving
from rollout.server.sglang.control import Answer, change, refuse, success
from rollout.server.sglang.weights import weights_root
from rollout.server.vllm.puller import Puller
from rollout.server.vllm.weight_bodies import (
    FetchBody,
    FinishBody,
    InitBody,
    InitInfo,
    StartBody,
    UpdateBody,
    UpdateInfo,
    require_checkpoint_names,
)
from rollout.weights.disk_source import DiskSource
from rollout.weights.source import WeightSource


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

    @router.post("/start_draft_weight_update", responses=CHANGED)
    async def start_draft_weight_update(body: StartBody | None = None) -> JsonAnswer:
        """Open an update of several calls that brings the draft model alone."""
        return await transfer.start(body or StartBody(), is_draft=True)

    @router.post("/fetch_weights", responses=CHANGED)
    async def fetch_weights(body: FetchBody) -> JsonAnswer:
        """Bring the local checkpoint to a published version; generation goes on."""
        return await transfer.fetch(body)

    @router.post("/update_weights", responses=CHANGED)
    async def update_weights(body: UpdateBody) -> JsonAnswer:
        """Take tensors of the open update; without one, an update of its own."""
        return await transfer.update(body)

    @router.post("/finish_weight_update", responses=CHANGED)
    async def finish_weight_update(body: FinishBody | None = None) -> JsonAnswer:
        """Commit."""
        return await transfer.finish(body or FinishBody())

    return router


class _Transfer:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._root = weights_root(serving)
        self._puller = Puller(serving)
        self._joined: dict[str, InitInfo] = {}  # by the group's name
        # What a trainer named last, by its group's name and the models it was for
        self._announced: dict[tuple[str, str], UpdateInfo] = {}
        self._checkpoint: str | None = None  # the folder that follows SkyRL's deltas
        self._fetched: int | None = None  # the version that it was brought to
        self._known_version = 0  # of the weights that the trainer has sent, or found as it joined

    async def join(self, info: InitInfo) -> JsonAnswer:
        if info.local_checkpoint_dir is not None:
            self._checkpoint, self._fetched = info.local_checkpoint_dir, None
            return success("Weight transfer initialized")
        try:
            group = info.group()
        except InvalidInputError as error:
            return await refuse(self._serving, error)

        def join(engine: Engine) -> Answer:
            self._leave(engine, info.group_name)
            engine.init_weights_update_group(**group)
            self._joined[info.group_name] = info
            self._note_version(engine)
            return {"message": "Weight transfer initialized"}

        return await change(self._serving, join)

    async def leave(self) -> JsonAnswer:
        def leave(engine: Engine) -> Answer:
            for name in list(self._joined):
                self._leave(engine, name)
            return {"message": "Weight transfer engine shut down"}

        return await change(self._serving, leave)

    def _leave(self, engine: Engine, group_name: str) -> None:
        for key in [key for key in self._announced if key[0] == group_name]:
            del self._announced[key]
        if self._joined.pop(group_name, None) is not None:
            engine.destroy_weights_update_group(group_name)

    async def start(self, body: StartBody, *, is_draft: bool = False) -> JsonAnswer:
        def begin(engine: Engine) -> Answer:
            require_checkpoint_names(body.is_checkpoint_format)
            options = body.options | ({"selector": "draft"} if is_draft else {})
            self._serving.open_update.begin(engine, None, options)
            return {"message": "Weight update started"}

        return await change(self._serving, begin)

    async def fetch(self, body: FetchBody) -> JsonAnswer:
        if self._checkpoint is None:
            wrong = InvalidInputError(
                "init_info.local_checkpoint_dir", None,
                "tell /init_weight_transfer_engine the folder to keep versions in",
            )  # fmt: skip
            return await refuse(self._serving, wrong)
        source = body.sync_dir or (body.uri or "").rstrip("/").rpartition("/")[0]
        self._fetched = None  # meanwhile the folder holds neither version
        answer = await self._puller.pull(self._checkpoint, source, body.target_version)
        if answer.status_code == 200:
            self._fetched = body.target_version
        return answer

    async def update(self, body: UpdateBody) -> JsonAnswer:
        info, folder = body.update_info, body.weight_dir
        try:
            if (info is None) == (folder is None):
                raise InvalidInputError("update_info", None, "give either it or weight_dir")
            if info is not None:
                info.check_fields()
                if info.target_version is not None:
                    folder = self._folder_of(info.target_version)
        except InvalidInputError as error:
            return await refuse(self._serving, error)
        if info is not None and folder is None:
            return await self._receive(info, body.options)

        def read(engine: Engine) -> Answer:
            assert folder is not None
            return self._load(
                engine, DiskSource(self._root.folder("weight_dir", folder)), body.options
            )

        return await change(self._serving, read)

    def _load(self, engine: Engine, source: WeightSource, options: dict[str, Any]) -> Answer:
        answer = self._serving.open_update.load(engine, source, options)
        self._note_version(engine)
        return answer

    async def _receive(self, info: UpdateInfo, options: dict[str, Any]) -> JsonAnswer:
        name = info.group_name
        selector = await self._serving.call(lambda engine: self._serving.open_update.selector)
        last = self._announced.get((name, selector))
        if not info.names and last is not None:
            info = last
        self._announced[name, selector] = info
        joined = self._joined.get(name)
        is_packed = info.packed
        if is_packed is None and info.num_updates_list is None:  # sparse updates are not packed
            is_packed = joined is not None and joined.packed
        num_bytes = 2**30 if joined is None else joined.packed_buffer_size_bytes
        if info.num_updates_list is not None:
            options.setdefault("base_version", self._known_version)
        load_format = f"packed:{num_bytes}" if is_packed else None
        source = info.source(load_format)
        return await change(self._serving, lambda engine: self._load(engine, source, options))

    def _folder_of(self, version: int) -> str:
        """The folder that was brought to SkyRL's version. Raises InvalidInputError."""
        if self._checkpoint is None or version != self._fetched:
            raise InvalidInputError(
                "update_info.target_version", version,
                f"/fetch_weights brings it first; it brought {self._fetched}",
            )  # fmt: skip
        return self._checkpoint

    async def finish(self, body: FinishBody) -> JsonAnswer:
        def end(engine: Engine) -> Answer:
            answer = self._serving.open_update.end(engine, body.weight_version)
            self._note_version(engine)
            return answer

        return await change(self._serving, end)

    def _note_version(self, engine: Engine) -> None:
        self._known_version = engine.weight_version
