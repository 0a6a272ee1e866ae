"""Whether the server is alive."""

from __future__ import annotations

from fastapi import APIRouter, Response

from rollout.server.errors import DrainingError
from rollout.server.serving import Serving


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health")
    async def health() -> Response:
        """200 while requests are taken, if only to wait; 503 once the engine has failed or the
        server is about to end."""
        if serving.is_draining:
            raise DrainingError("the server is shutting down")
        serving.loop.require_open()
        return Response()

    return router
