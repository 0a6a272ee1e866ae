"""Routes whose bodies are JSON and may be long: they hold up no other request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from rollout.server.json_body import NOT_DECLARED, content_type
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
        reads_body = self.body_field is not None

        async def answer_json(request: Request) -> Response:
            if reads_body and _has_other_body(request):
                raise HTTPException(415, NOT_DECLARED)
            return await answer(JsonRequest(request.scope, request.receive))

        return answer_json


def _has_other_body(request: Request) -> bool:
    """One that is not declared to be JSON, as curl's are unless it is told."""
    kind = content_type(request)
    is_json = kind.startswith("application/") and kind.endswith(("/json", "+json"))
    length = request.headers.get("content-length", "0")
    return not is_json and (length != "0" or "transfer-encoding" in request.headers)
