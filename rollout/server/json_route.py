"""Routes whose bodies are JSON and may be long: read in pieces, they hold up no other request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from rollout.errors import InvalidInputError
from rollout.server.json_pieces import loads_in_pieces

Body = TypeVar("Body", bound=BaseModel)

NOT_DECLARED = "the body must be declared as Content-Type: application/json"


async def json_body(request: Request, model: type[Body]) -> Body:
    """The body as ``model``, of a `JsonRoute`. Raises what a route that declares it would.

    Anything not declared to be JSON is refused: a web page may send other types to any server that
    its reader's machine can reach, without asking.
    """
    _require_json(request)
    try:
        value = await request.json()
    except json.JSONDecodeError as error:
        wrong = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}
        raise RequestValidationError([wrong]) from None
    return await _validated(model.model_validate, value)


async def json_of_texts(request: Request, model: type[Body]) -> Body:
    """Does what `json_body` does for texts of gigabytes: copies them once, while other threads
    wait."""
    _require_json(request)
    return await _validated(model.model_validate_json, await request.body())


async def _validated(validate: Callable[[Any], Body], value: Any) -> Body:
    try:
        return await asyncio.to_thread(validate, value)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in wrong]
        ) from None


def _require_json(request: Request) -> None:
    if content_type(request) != "application/json":
        raise HTTPException(415, NOT_DECLARED)


def content_type(request: Request) -> str:
    """Without parameters, in lower case; empty where there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def openapi_body(model: type[BaseModel], **others: dict[str, Any]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its body by itself.

    ``others``: further content types, with their schemas.
    """
    schema = model.model_json_schema()
    content = {"application/json": {"schema": schema}} | {
        name: {"schema": other} for name, other in others.items()
    }
    return {"requestBody": {"required": True, "content": content}}


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
