"""Pausing, sleeping and caches by vLLM's names. Each call does what one of sglang's does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from rollout.engine.engine_loop import RequestHandle
from rollout.engine.protocol import Engine
from rollout.errors import EngineStateError
from rollout.server.body_fields import CHANGED, Body
from rollout.server.json_route import JsonAnswer, JsonRoute
from rollout.server.serving import Serving
from rollout.server.sglang.control import Answer, change, flush_idle, memory_tags
from rollout.server.streams import while_connected
from rollout.types import MemoryTag, PauseMode

Mode = Literal["abort", "wait", "keep"]

_SCHEDULING = "scheduling"  # the tag of what sleeps at level 0
_POLL_SECONDS = 0.02  # of waits for requests to end


class PauseFields(Body):
    """``mode``: requests in flight end (abort), are waited for, or are kept with their KV."""

    mode: Mode = "abort"
    clear_cache: bool = True  # the prefix cache and all KV; not with mode=keep
    wait_for_inflight_requests: bool = False  # the former name of mode=wait


class AbortRequestsBody(Body):
    request_ids: list[str] | None = None  # default: all; an empty list names none


class SleepFields(Body):
    """``level``: 0 gives nothing back: nothing runs until `/wake_up`. 1 keeps the weights, 2 drops
    them: only a full update makes them serve again."""

    level: Literal["0", "1", "2"] = "1"
    mode: Mode = "abort"
    tags: list[str] = Field(["weights", "kv_cache"])


class WakeFields(Body):
    tags: list[str] | None = None  # default: all that is asleep


class ResetFields(Body):
    """``reset_running_requests``: they compute their KV anew; else they keep it, and the cache."""

    reset_running_requests: bool = False
    reset_external: bool = False  # there is no cache elsewhere


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=JsonRoute)
    sleeps_awake = False  # at level 0, which `/wake_up` ends as the others

    @router.post("/pause", responses=CHANGED)
    async def pause(
        query: Annotated[PauseFields, Query()], request: Request, body: Body | None = None
    ) -> JsonAnswer:
        """Run nothing until `/resume`; new requests wait."""
        mode = "wait" if query.wait_for_inflight_requests else query.mode

        def stop(engine: Engine) -> Answer:
            engine.pause_generation(PauseMode.ABORT if mode == "abort" else PauseMode.IN_PLACE)
            if query.clear_cache and mode != "keep":
                engine.flush_cache()
            return {"message": "generation is paused", "status": "paused"}

        async with _running_finished(serving, request, mode):
            return await change(serving, stop)

    @router.post("/resume", responses=CHANGED)
    async def resume(body: Body | None = None) -> JsonAnswer:
        """Continue, and commit the weights that came while generation was paused."""

        def go_on(engine: Engine) -> Answer:
            nonlocal sleeps_awake
            sleeps_awake = False
            return serving.open_update.continue_generation(engine) | {"status": "resumed"}

        return await change(serving, go_on)

    @router.post("/abort_requests")
    async def abort_requests(body: AbortRequestsBody | None = None) -> dict[str, int]:
        """End requests with the tokens they have: those that are named, or all."""
        ids = None if body is None else body.request_ids
        if ids is None:
            return {"aborted": await asyncio.wrap_future(serving.loop.abort_all())}
        return {"aborted": sum(serving.abort(each) for each in ids)}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": await serving.call(lambda engine: engine.is_paused)}

    @router.post("/sleep", responses=CHANGED)
    async def sleep(
        query: Annotated[SleepFields, Query()], request: Request, body: Body | None = None
    ) -> JsonAnswer:
        """Give memory back. Requests that are kept, and new ones, wait for it to be taken again."""

        def release(engine: Engine) -> Answer:
            nonlocal sleeps_awake
            if query.level == "0":
                sleeps_awake = not engine.is_paused
                engine.pause_generation(
                    PauseMode.ABORT if query.mode == "abort" else PauseMode.IN_PLACE
                )
                return {"freed_bytes": {}}
            if query.mode == "abort":
                was_paused = engine.is_paused
                engine.pause_generation(PauseMode.ABORT)
                if not was_paused:
                    engine.continue_generation()
            return {"freed_bytes": release_awake(engine, query.tags, query.level == "1")}

        async with _running_finished(serving, request, query.mode):
            return await change(serving, release)

    @router.post("/wake_up", responses=CHANGED)
    async def wake_up(
        query: Annotated[WakeFields, Query()], body: Body | None = None
    ) -> JsonAnswer:
        """Take memory again. A part that is awake stays as it is."""

        def take(engine: Engine) -> Answer:
            nonlocal sleeps_awake
            tags = query.tags
            if sleeps_awake and (tags is None or _SCHEDULING in tags):
                serving.open_update.continue_generation(engine)
                sleeps_awake = False
            if tags is not None:
                tags = [tag for tag in tags if tag != _SCHEDULING]
            resume_asleep(engine, tags)
            return {"state": engine.unavailable_reason}

        return await change(serving, take)

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        released = await serving.call(lambda engine: engine.released_tags)
        return {"is_sleeping": sleeps_awake or bool(released)}

    @router.post("/reset_prefix_cache", responses=CHANGED)
    async def reset_prefix_cache(
        query: Annotated[ResetFields, Query()], body: ResetFields | None = None
    ) -> JsonAnswer:
        """Drop the prefix cache. ``success`` is false while requests hold it; the corpus stays.

        Fields may come in the address or in the body.
        """
        resets = query.reset_running_requests or bool(body and body.reset_running_requests)

        def reset(engine: Engine) -> dict[str, Any]:
            if resets:
                engine.flush_cache()
            if resets or flush_idle(engine):
                return {"success": True, "message": "Cache flushed."}
            return {"success": False, "message": "requests hold it: set reset_running_requests"}

        return JsonAnswer(await serving.call(reset))

    return router


def release_awake(engine: Engine, tags: list[str], keep_weights: bool) -> dict[str, int]:
    held = [tag for tag in memory_tags(tags) if tag not in engine.released_tags]
    return engine.release_memory(held, keep_weights) if held else {}


def resume_asleep(engine: Engine, tags: list[str] | None) -> None:
    """Resume those of these parts that are asleep; None names all."""
    known = set(MemoryTag) - engine.released_tags
    engine.resume_memory([tag for tag in memory_tags(tags) if tag not in known])


@asynccontextmanager
async def _running_finished(serving: Serving, request: Request, mode: Mode) -> AsyncIterator[None]:
    """With mode ``wait``: hold new requests back, and begin when the running ones have ended."""
    if mode != "wait":
        yield
        return
    with serving.loop.holding() as unfinished:
        await while_connected(request, _finish(serving, unfinished))
        yield


async def _finish(serving: Serving, unfinished: Sequence[RequestHandle]) -> None:
    """Wait until these end. Raises EngineStateError while nothing can run: they would not."""
    while not all(handle.future.done() for handle in unfinished):
        reason = await serving.call(lambda engine: engine.unavailable_reason)
        if reason:
            raise EngineStateError(f"what is unfinished does not end: {reason}")
        await asyncio.sleep(_POLL_SECONDS)
