"""JSON bodies and answers: msgspec parses and writes them, long ones off the event loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

from rollout.errors import InvalidInputError

Body = TypeVar("Body", bound=BaseModel)

NOT_DECLARED = "the body must be declared as Content-Type: application/json"

_encode = msgspec.json.Encoder(enc_hook=np.generic.item).encode  # numpy's scalars as Python's


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8. Lone surrogates stay escaped; infinities and NaN become null."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


class JsonAnswer(JSONResponse):
    """An answer that every reader takes, whatever a client's text or a model's numbers hold."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


async def json_response(build: Callable[[], Any]) -> Response:
    """A JSON answer, built and written off the event loop, for it may be long."""

    def content() -> bytes:
        return json_bytes(build())

    return Response(await asyncio.to_thread(content), media_type="application/json")


async def json_body(request: Request, model: type[Body]) -> Body:
    """The body as ``model``, of a `JsonRoute`. Raises what a route that declares it would.

    Anything not declared to be JSON is refused: a web page may send other types to any server that
    its reader's machine can reach, without asking.
    """
    _require_json(request)
    return await _validated(model.model_validate, await request.json())


async def json_of_texts(request: Request, model: type[Body]) -> Body:
    """`json_body` for texts of gigabytes, which are copied once."""
    _require_json(request)
    return await _validated(model.model_validate_json, await request.body())


async def _validated(validate: Callable[[Any], Body], value: Any) -> Body:
    try:
        return await asyncio.to_thread(validate, value)
    except ValidationError as error:
        raise request_error(error) from None


def request_error(error: ValidationError, *location: str) -> RequestValidationError:
    """The error that FastAPI raises for a body. ``location``: of the validated value in it."""
    wrong = error.errors(include_url=False, include_input=False, include_context=False)
    return RequestValidationError(
        [{**each, "loc": ("body", *location, *each["loc"])} for each in wrong]
    )


def _require_json(request: Request) -> None:
    if content_type(request) != "application/json":
        raise HTTPException(415, NOT_DECLARED)


def content_type(request: Request) -> str:
    """The content type without parameters, in lower case; empty where there is none."""
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


class JsonRequest(Request):
    """A request whose long bodies are parsed off the event loop."""

    async def json(self) -> Any:
        """Raises HTTPException for a body that cannot be read."""
        body = await self.body()
        if len(body) <= _SHORT:
            return loads(body)
        return await asyncio.to_thread(loads, body)


def loads(body: bytes) -> Any:
    """The value of a JSON body.

    Raises HTTPException for what is not JSON, and for too many lists and objects: each takes 30
    times the memory of its bytes.
    """
    if _num_brackets(body) > _MAX_CONTAINERS < _num_brackets(_TEXT.sub(b"", body)):
        raise HTTPException(
            400, f"the body holds more than {_MAX_CONTAINERS} lists and objects: send several"
        )
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"the body is not JSON in UTF-8: {error}") from None
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None


def _num_brackets(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


class JsonRoute(APIRoute):
    """A route of FastAPI that requires a declared JSON body and refuses unknown query fields."""

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


_SHORT = 2**16  # bytes, which take less time to parse than to hand to a thread
_MAX_CONTAINERS = 2**18
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # never backtracks
