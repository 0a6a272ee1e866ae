"""Calls that change the engine, and how they are answered: pausing, aborting, flushing, sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError, RolloutError
from rollout.server.body_fields import CHANGED, Body
from rollout.server.errors import error_body
from rollout.server.json_route import JsonAnswer, JsonRoute
from rollout.server.middleware import require_admin
from rollout.server.serving import Serving
from rollout.types import MemoryTag, PauseMode

_LONGEST_WAIT = 600.0  # seconds

T = TypeVar("T")
Answer = dict[str, Any]


class RefusedError(Exception):
    """The engine refused a change, or failed in it.

    ``unavailable_reason``: why no step can run since.
    """

    def __init__(self, error: Exception, unavailable_reason: str = "") -> None:
        self.error = error
        self.unavailable_reason = unavailable_reason

    @property
    def response(self) -> JsonAnswer:
        error = self.error
        status, body = error_body(error)
        message = str(error)
        if isinstance(error, HTTPException):
            message = error.detail
        else:
            status = 400
            if not isinstance(error, RolloutError):
                message = f"{type(error).__name__}: {error}"
        message = ". ".join([message, *getattr(error, "__notes__", [])])
        body["error"] |= {"message": message, "code": status}
        answer = {"success": False, "message": message, "state": self.unavailable_reason}
        return JsonAnswer(answer | body, status)


async def attempt(serving: Serving, function: Callable[[Engine], T]) -> T:
    """Run ``function`` between two steps and return its value. Raises RefusedError for failures
    that a caller can expect."""

    def run(engine: Engine) -> T:
        try:
            return function(engine)
        except (RolloutError, OSError, HTTPException) as error:
            raise RefusedError(error, engine.unavailable_reason) from None

    return await serving.call(run)


async def change(serving: Serving, function: Callable[[Engine], Answer]) -> JsonAnswer:
    """Run ``function`` between two steps; answer ``{"success", "message", ...}`` with its result.

    Where the engine refuses or fails the status is 400, and ``state`` says why no step can run now
    (empty: one can).
    """
    try:
        return success(**await attempt(serving, function))
    except RefusedError as refused:
        return refused.response


async def refuse(serving: Serving, error: InvalidInputError) -> JsonAnswer:
    """The answer to a change whose body is wrong: the engine was not asked for it."""
    reason = await serving.call(lambda engine: engine.unavailable_reason)
    return RefusedError(error, reason).response


def success(message: str = "", **answer: Any) -> JsonAnswer:
    return JsonAnswer({"success": True, "message": message} | answer)


class AbortBody(BaseModel):
    """``rid``: the request to end. ``abort_all``: all of them instead, with the admin key."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rid: str | None = None
    abort_all: bool = False


class PauseBody(Body):
    """``mode``: the treatment of requests in flight."""

    mode: PauseMode = PauseMode.ABORT


class FlushFields(Body):
    """``timeout``: seconds to wait until the engine is idle."""

    timeout: float = Field(0.0, ge=0.0, le=_LONGEST_WAIT, allow_inf_nan=False)


def user_routes(serving: Serving) -> APIRouter:
    """Aborting, which takes the admin key only for the requests of all."""
    router = APIRouter(tags=["sglang"], route_class=JsonRoute)
    check_admin = require_admin(serving.config)

    @router.post("/abort_request")
    async def abort_request(body: AbortBody, request: Request) -> dict[str, int]:
        """End the request of a rid, or all requests, which takes the admin key.

        They answer with their tokens and finish type abort. A request that has ended is no error.
        """
        if body.abort_all:
            await check_admin(request)
            return {"aborted": await asyncio.wrap_future(serving.loop.abort_all())}
        if not body.rid:
            raise InvalidInputError("rid", body.rid, "name a request, or set abort_all")
        return {"aborted": serving.abort(body.rid)}

    return router


def admin_routes(serving: Serving) -> APIRouter:
    """Pausing, continuing and flushing."""
    router = APIRouter(tags=["sglang"], route_class=JsonRoute)

    @router.post("/pause_generation", responses=CHANGED)
    async def pause_generation(body: PauseBody) -> JsonAnswer:
        """Run nothing until `/continue_generation`: new requests wait, running ones do as ``mode``
        says (abort, retract, in_place)."""

        def pause(engine: Engine) -> Answer:
            engine.pause_generation(body.mode)
            return {"message": "generation is paused", "status": "ok"}

        return await change(serving, pause)

    @router.post("/continue_generation", responses=CHANGED)
    async def continue_generation(body: Body | None = None) -> JsonAnswer:
        """Continue, and commit the weights that came while generation was paused."""

        def go_on(engine: Engine) -> Answer:
            return serving.open_update.continue_generation(engine) | {"status": "ok"}

        return await change(serving, go_on)

    @router.get("/flush_cache", responses=CHANGED)
    async def flush_cache(query: Annotated[FlushFields, Query()]) -> JsonAnswer:
        """Drop the prefix cache, which takes an idle engine: else 400, after ``timeout`` seconds.

        The corpus that drafts come from stays.
        """
        return await flush(query.timeout)

    @router.post("/flush_cache", responses=CHANGED)
    async def post_flush_cache(
        query: Annotated[FlushFields, Query()], body: FlushFields | None = None
    ) -> JsonAnswer:
        """The same; ``timeout`` may come in the address or the body, and the longer one counts."""
        return await flush(max(query.timeout, 0.0 if body is None else body.timeout))

    @router.post("/drain")
    async def drain(body: FlushFields | None = None) -> dict[str, Any]:
        """Wait until no request runs or waits, at most ``timeout`` seconds."""
        deadline = time.monotonic() + (0.0 if body is None else body.timeout)
        while (remaining := serving.num_unfinished) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return {"success": not remaining, "remaining_requests": remaining}

    async def flush(timeout: float) -> JsonAnswer:
        deadline = time.monotonic() + timeout
        while not await serving.call(flush_idle):
            if time.monotonic() >= deadline:
                message = f"{serving.num_unfinished} requests are running or waiting"
                return JsonAnswer({"success": False, "message": message}, 400)
            await asyncio.sleep(0.05)
        return success("Cache flushed.")

    return router


def flush_idle(engine: Engine) -> bool:
    """Drop the prefix cache of an idle engine; whether it was one."""
    if engine.has_unfinished:
        return False
    engine.flush_cache()
    return True


_NAMES = {
    "weights": MemoryTag.WEIGHTS.value,
    "kv_cache": MemoryTag.KV_CACHE.value,
    "cuda_graph": MemoryTag.GRAPHS.value,
}
"""sglang's names of memory tags. Other names go to the engine, whose error lists the valid ones."""


class ResumeBody(Body):
    """The body of a call to resume memory. ``tags``: None for all that are released."""

    tags: list[str] | None = None


class ReleaseBody(ResumeBody):
    """The body of a call to release memory. ``tags``: None for all."""

    keep_weights: bool = True  # else they are lost, and only a full update makes them serve again


def memory_routes(serving: Serving) -> APIRouter:
    """Sleep: giving memory back, and taking it again."""
    router = APIRouter(tags=["memory"], route_class=JsonRoute)

    @router.post("/release_memory_occupation", responses=CHANGED)
    async def release_memory_occupation(body: ReleaseBody | None = None) -> JsonAnswer:
        """Requests wait until the needed memory is resumed; running ones recompute their KV."""
        wanted = body or ReleaseBody()

        def release(engine: Engine) -> Answer:
            freed = engine.release_memory(memory_tags(wanted.tags), wanted.keep_weights)
            return {"freed_bytes": freed}

        return await change(serving, release)

    @router.post("/resume_memory_occupation", responses=CHANGED)
    async def resume_memory_occupation(body: ResumeBody | None = None) -> JsonAnswer:
        wanted = body or ResumeBody()

        def resume(engine: Engine) -> Answer:
            tags = None if wanted.tags is None else memory_tags(wanted.tags)
            if tags is not None and MemoryTag.GRAPHS not in engine.released_tags:
                # Clients resume graphs beside the KV cache whether or not they released them.
                tags = [tag for tag in tags if tag != MemoryTag.GRAPHS]
            engine.resume_memory(tags)
            return {"state": engine.unavailable_reason}

        return await change(serving, resume)

    return router


def memory_tags(names: list[str] | None) -> list[str]:
    """The engine's tags by the names of clients; None names all."""
    return [_NAMES.get(name, name) for name in (_NAMES if names is None else names)]
