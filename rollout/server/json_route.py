"""Routes whose bodies are JSON and may be long: they hold up no other request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from rollout.errors import InvalidInputError
from rollout.server.json_body import NOT_DECLARED, content_type
from rollout.server.json_pieces import loads_in_pieces

_SHORT = 2**16  # bytes that take less time to parse than to hand to a thread


class JsonRequest(Request):
    async def json(self) -> Any:
        """Raises JSONDecodeError, and HTTPException for what is JSON and cannot be read."""
        body = await self.body()
        try:
            if len(body) <= _SHORT:
                return loads_in_pieces(body)
            return await asyncio.to_thread(loads_in_pieces, body)
        except json.JSONDecodeError:
            raise
        except UnicodeDecodeError:
            raise HTTPException(400, "the body must be UTF-8") from None
        except RecursionError:
            raise HTTPException(400, "the body is nested too deeply") from None
        except ValueError as error:  # a field that comes twice, an integer of thousands of digits
            raise HTTPException(400, f"the body cannot be read: {error}") from None


class JsonRoute(APIRoute):
    """Declares its body as any route of FastAPI does, and is documented and refused alike."""

    refuses_queries = True

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        reads_body = self.body_field is not None
        takes_queries = not self.refuses_queries or bool(self.dependant.query_params)

        async def answer_json(request: Request) -> Response:
            if reads_body and _has_other_body(request):
                raise HTTPException(415, NOT_DECLARED)
            if not takes_queries:
                refuse_query(request)
            return await answer(JsonRequest(request.scope, request.receive))

        return answer_json


def refuse_query(request: Request) -> None:
    """Raises InvalidInputError for a call whose fields come in its body."""
    for name, value in request.query_params.items():
        raise InvalidInputError(name, value, "is no part of the address: fields go in the body")


def _has_other_body(request: Request) -> bool:
    """One that is not declared to be JSON, as curl's are unless it is told."""
    kind = content_type(request)
    is_json = kind.startswith("application/") and kind.endswith(("/json", "+json"))
    length = request.headers.get("content-length", "0")
    return not is_json and (length != "0" or "transfer-encoding" in request.headers)
