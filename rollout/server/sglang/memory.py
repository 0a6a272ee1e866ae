"""Giving memory back over HTTP, and taking it again."""

from __future__ import annotations

from fastapi import APIRouter

from rollout.engine.protocol import Engine
from rollout.server.documented import CHANGED
from rollout.server.json_answer import JsonAnswer
from rollout.server.json_route import JsonRoute
from rollout.server.serving import Serving
from rollout.server.sglang.changes import Answer, change
from rollout.server.sglang.fields import Body
from rollout.types import MemoryTag

_NAMES = {
    "weights": MemoryTag.WEIGHTS.value,
    "kv_cache": MemoryTag.KV_CACHE.value,
    "cuda_graph": MemoryTag.GRAPHS.value,
}
"""sglang's. Other texts go to the engine, whose error lists those there are."""


class ResumeBody(Body):
    """``tags``: None for all that are released."""

    tags: list[str] | None = None


class ReleaseBody(ResumeBody):
    """``tags``: None for all."""

    keep_weights: bool = True  # else they are lost, and only a full update makes them serve again


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["memory"], route_class=JsonRoute)

    @router.post("/release_memory_occupation", responses=CHANGED)
    async def release_memory_occupation(body: ReleaseBody | None = None) -> JsonAnswer:
        """Requests wait until what is needed has been resumed; running ones compute anew."""
        wanted = body or ReleaseBody()

        def release(engine: Engine) -> Answer:
            freed = engine.release_memory(_tags(wanted.tags), wanted.keep_weights)
            return {"freed_bytes": freed}

        return await change(serving, release)

    @router.post("/resume_memory_occupation", responses=CHANGED)
    async def resume_memory_occupation(body: ResumeBody | None = None) -> JsonAnswer:
        wanted = body or ResumeBody()

        def resume(engine: Engine) -> Answer:
            tags = None if wanted.tags is None else _tags(wanted.tags)
            if tags is not None and MemoryTag.GRAPHS not in engine.released_tags:
                # Clients resume graphs beside the KV cache whether or not they released them.
                tags = [tag for tag in tags if tag != MemoryTag.GRAPHS]
            engine.resume_memory(tags)
            return {"state": engine.unavailable_reason}

        return await change(serving, resume)

    return router


def _tags(names: list[str] | None) -> list[str]:
    return [_NAMES.get(name, name) for name in (_NAMES if names is None else names)]
