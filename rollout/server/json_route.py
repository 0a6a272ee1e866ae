"""Routes whose bodies are JSON and may be long: they hold up no other request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from rollout.server.json_pieces import loads_in_pieces

_SHORT = 2**16  # bytes that take less time to parse than to hand to a thread


class JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _SHORT:
            return loads_in_pieces(body)
        return await asyncio.to_thread(loads_in_pieces, body)


class JsonRoute(APIRoute):
    """Declares its body as any route of FastAPI does, and is documented and refused alike."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_json(request: Request) -> Response:
            return await answer(JsonRequest(request.scope, request.receive))

        return answer_json
