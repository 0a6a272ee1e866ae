"""New weights over HTTP, and looks at the ones there are.

A call is an update of its own, or brings tensors of one that is open: /begin_weight_update opens
one, and so does the first bucket while generation is paused (`HttpWeightUpdate`). Requests in
flight fare as ``abort_all_requests``, ``flush_cache`` and the mode of the pause say. What fails
before its first byte leaves the old weights serving; what fails later leaves the engine refusing to
generate until a full update.

Tensors come as safetensors bytes, by a path below a configured root, through a group or through
shared memory. Never as a pickle.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request

from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError
from rollout.hub import hub_name
from rollout.server.allowed_paths import AllowedPaths
from rollout.server.body_fields import CHANGED, Body
from rollout.server.json_route import (
    JsonAnswer,
    JsonRoute,
    content_type,
    json_bytes,
    json_of_texts,
    openapi_body,
    refuse_query,
)
from rollout.server.received_tensors import ReceivedFile, ReceivedTensors
from rollout.server.serving import Serving
from rollout.server.sglang.control import Answer, change, refuse
from rollout.server.sglang.weight_bodies import (
    AbandonBody,
    BeginBody,
    CheckerBody,
    DiskBody,
    DistributedBody,
    GroupBody,
    InitGroupBody,
    IpcBody,
    TensorBody,
    TensorByName,
    TensorFields,
    VersionBody,
)
from rollout.weights.disk_source import DiskSource
from rollout.weights.shared_memory import HandleSource
from rollout.weights.weight_check import Checksums

RAW_TYPES = ("application/octet-stream", "application/x-safetensors")
_BINARY = {"type": "string", "format": "binary"}


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["weights"], route_class=JsonRoute)
    update = serving.open_update
    root = weights_root(serving)

    @router.post(
        "/update_weights_from_tensor",
        responses=CHANGED,
        openapi_extra=openapi_body(TensorBody, **dict.fromkeys(RAW_TYPES, _BINARY)),
    )
    async def update_weights_from_tensor(
        request: Request, query: Annotated[TensorFields, Query()]
    ) -> JsonAnswer:
        """Safetensors bytes: in base64 as JSON, or the body itself, the options in the query."""
        try:
            body, tensors = await _received(request, query)
        except InvalidInputError as error:
            return await refuse(serving, error)

        def take(engine: Engine) -> Answer:
            with tensors:
                return update.load(engine, tensors, body.options)

        return await change(serving, take)

    @router.post("/update_weights_from_disk", responses=CHANGED)
    async def update_weights_from_disk(body: DiskBody) -> JsonAnswer:
        """A safetensors folder below server.weights_root, or the model's own."""

        def read(engine: Engine) -> Answer:
            if body.load_format not in (None, "auto", "safetensors"):
                raise InvalidInputError(
                    "load_format", body.load_format, "must be auto or safetensors"
                )
            folder = root.folder("model_path", body.model_path)
            return update.load(engine, DiskSource(folder), body.options)

        return await change(serving, read)

    @router.post("/update_weights_from_distributed", responses=CHANGED)
    async def update_weights_from_distributed(body: DistributedBody) -> JsonAnswer:
        """Receive the weights that the group's sender broadcasts meanwhile."""
        return await change(serving, lambda engine: update.load(engine, body.source, body.options))

    @router.post("/update_weights_from_ipc", responses=CHANGED)
    async def update_weights_from_ipc(body: IpcBody) -> JsonAnswer:
        """Buckets in shared memory of this host, or of a GPU that both processes see."""
        source = HandleSource(body.handles)
        return await change(serving, lambda engine: update.load(engine, source, body.options))

    @router.post("/begin_weight_update", responses=CHANGED)
    async def begin_weight_update(body: BeginBody) -> JsonAnswer:
        """Open an update of several calls. Options they bring belong here, or to the first."""

        def begin(engine: Engine) -> Answer:
            update.begin(engine, body.announced(), body.options)
            return {"message": "an update is open: /end_weight_update commits it"}

        return await change(serving, begin)

    @router.post("/end_weight_update", responses=CHANGED)
    async def end_weight_update(body: Body | None = None) -> JsonAnswer:
        """Commit."""

        def end(engine: Engine) -> Answer:
            return update.end(engine)

        return await change(serving, end)

    @router.post("/abandon_weight_update", responses=CHANGED)
    async def abandon_weight_update(body: AbandonBody) -> JsonAnswer:
        """Give the open update up, if there is one."""

        def abandon(engine: Engine) -> Answer:
            update.abandon(engine, body.reason)
            return {"state": engine.unavailable_reason}

        return await change(serving, abandon)

    @router.post("/update_weight_version", responses=CHANGED)
    async def update_weight_version(body: VersionBody) -> JsonAnswer:
        """Name the weights. Where that is another name, the number rises too: tokens from now on
        are told apart."""
        if body.abort_all_requests:
            await asyncio.wrap_future(serving.loop.abort_all())

        def announce(engine: Engine) -> Answer:
            update.announce(engine, body.new_version)
            message = f"Weight version updated to {body.new_version}"
            return {"message": message, "new_version": str(body.new_version)}

        return await change(serving, announce)

    @router.post("/init_weights_update_group", responses=CHANGED)
    async def init_weights_update_group(body: InitGroupBody) -> JsonAnswer:
        """Join a group; nothing is generated until all of its members have come."""

        def join(engine: Engine) -> Answer:
            engine.init_weights_update_group(
                body.master_address.strip("[]"), body.master_port, body.rank_offset,
                body.world_size, body.group_name, body.backend, body.timeout,
            )  # fmt: skip
            return {"message": f"joined {body.group_name}"}

        return await change(serving, join)

    @router.post("/destroy_weights_update_group", responses=CHANGED)
    async def destroy_weights_update_group(body: GroupBody) -> JsonAnswer:
        def leave(engine: Engine) -> Answer:
            engine.destroy_weights_update_group(body.group_name)
            return {"message": f"left {body.group_name}"}

        return await change(serving, leave)

    @router.post("/get_weights_by_name")
    async def get_weights_by_name(body: TensorByName) -> list[Any]:
        """The first rows of a matrix, or values of a vector."""
        return await serving.call(
            lambda engine: engine.get_weights_by_name(body.name, body.truncate_size)
        )

    @router.post("/weights_checker", responses=CHANGED)
    async def weights_checker(body: CheckerBody) -> JsonAnswer:
        """Checksums by rank, and a digest of all weights to compare engines by; or a step of the
        round that checks an update: snapshot, reset_tensors, the update, compare. Nothing is
        generated meanwhile, nor between reset_tensors and a full update."""

        def check(engine: Engine) -> Answer:
            skip = tuple(body.skip_tensor_list or ())
            checksums = engine.check_weights(body.action, body.selector, skip)
            answer = {"message": "Success.", "state": engine.unavailable_reason}
            if body.action != "checksum":
                return answer
            digest = engine.weights_digest(body.selector)
            ranks = _ranks(checksums, body.selector, serving.serve_config.parallel.size)
            return answer | {"per_engine_checksum": digest, "ranks": ranks}

        return await change(serving, check)

    return router


def _ranks(checksums: Sequence[Checksums], selector: str, num_ranks: int) -> list[dict[str, Any]]:
    """Checksums as sglang has them, for ``num_ranks`` ranks of each replica."""
    return [
        {
            "checksums": each,
            "per_gpu_checksum": hashlib.sha256(json_bytes(sorted(each.items()))).hexdigest(),
            "parallelism_info": {
                "role": "target" if selector == "all" else selector,
                "tp_rank": number % num_ranks, "tp_size": num_ranks,
                "dp_rank": number // num_ranks, "dp_size": len(checksums) // num_ranks,
                "pp_rank": 0, "pp_size": 1,
                "rank": number % num_ranks, "size": num_ranks,
            },
        }
        for number, each in enumerate(checksums)
    ]  # fmt: skip


def weights_root(serving: Serving) -> AllowedPaths:
    """The folders that weights may be read from."""
    configured = serving.config.weights_root
    folders = [serving.model_path] if configured is None else [configured, serving.model_path]
    if hub_name(serving.model_path) is not None:  # its files are links into the cache
        folders.append(str(Path(serving.model_path).parents[1] / "blobs"))
    return AllowedPaths("server.weights_root", folders)


async def _received(request: Request, query: TensorFields) -> tuple[TensorFields, ReceivedTensors]:
    """The options of the call and its tensors. Raises InvalidInputError."""
    kind = content_type(request)
    if kind in RAW_TYPES:
        with ExitStack() as on_error:
            file = on_error.enter_context(closing(ReceivedFile("body")))
            async for chunk in request.stream():
                file.write(chunk)
            tensors = await asyncio.to_thread(ReceivedTensors, [file])
            tensors.is_direct = _is_direct(query)
            on_error.pop_all()
        return query, tensors
    if kind != "application/json":
        raise HTTPException(
            415, f"the body must be one of application/json, {', '.join(RAW_TYPES)}"
        )
    refuse_query(request)
    body = await json_of_texts(request, TensorBody)
    return body, await asyncio.to_thread(_decoded, body)


def _is_direct(fields: TensorFields) -> bool:
    if fields.load_format not in (None, "direct"):
        raise InvalidInputError(
            "load_format", fields.load_format,
            "must be left out, or direct: safetensors bytes say what they hold",
        )  # fmt: skip
    return fields.load_format == "direct"


def _decoded(body: TensorBody) -> ReceivedTensors:
    files: list[ReceivedFile] = []
    with ExitStack() as on_error:
        for index, text in enumerate(dict.fromkeys(body.serialized_named_tensors)):
            file = ReceivedFile(f"serialized_named_tensors[{index}]")
            files.append(on_error.enter_context(closing(file)))
            try:
                file.write(base64.b64decode(text, validate=True))
            except (binascii.Error, ValueError) as error:
                raise InvalidInputError(file.field, text, f"must be base64: {error}") from None
        tensors = ReceivedTensors(files)
        tensors.is_direct = _is_direct(body)
        on_error.pop_all()
    return tensors
