"""`GET /status`: what the engine is doing, as JSON."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from rollout.engine.status import EngineStatus
from rollout.server.serving import Serving


class StatusBody(BaseModel):
    """``engine`` as it was ``age`` seconds ago: it answers between two steps or updates."""

    model: str
    uptime: float  # seconds
    unfinished: int  # requests admitted and not yet answered whole
    draining: bool  # no new ones are taken
    age: float  # seconds
    engine: EngineStatus


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/status")
    async def status() -> StatusBody:
        known = await serving.status_cache.latest()
        return StatusBody(
            model=serving.model_name,
            uptime=serving.uptime,
            unfinished=serving.num_unfinished,
            draining=serving.is_draining,
            age=known.age,
            engine=known.status,
        )

    return router
