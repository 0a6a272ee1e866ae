"""Bodies and answers in JSON: routes whose bodies may be long hold up no other request.

A parser in C holds the interpreter's lock until it is done, on whatever thread it runs: 46 MiB of
token ids keep every other one waiting for half a second and more. So long bodies are read in
chunks, and other threads run in between.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from json import JSONDecodeError
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
    try:
        value = await request.json()
    except JSONDecodeError as error:
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
    """A request whose long bodies are read in chunks, off the event loop."""

    async def json(self) -> Any:
        """Raises JSONDecodeError, and HTTPException for what is JSON and cannot be read."""
        body = await self.body()
        try:
            if len(body) <= _CHUNK:
                return loads_in_chunks(body)
            return await asyncio.to_thread(loads_in_chunks, body)
        except JSONDecodeError:
            raise
        except UnicodeDecodeError:
            raise HTTPException(400, "the body must be UTF-8") from None
        except RecursionError:
            raise HTTPException(400, "the body is nested too deeply") from None
        except ValueError as error:  # a field that comes twice, an integer of thousands of digits
            raise HTTPException(400, f"the body cannot be read: {error}") from None


class JsonRoute(APIRoute):
    """A route whose JSON body is declared as in any route of FastAPI, documented alike and refused
    alike."""

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


_CHUNK = 2**16  # characters; shorter bodies take less time to parse than to hand to a thread
_MAX_CONTAINERS = 2**18  # lists and objects
_NUMBERS = re.compile(r"[-+.0-9eE, \t\n\r]*")
_BLANKS = re.compile(r"[ \t\n\r]*")


class Integers(list[int]):
    """An array of integers alone; whoever reads it need not look at each again."""


def loads_in_chunks(data: bytes) -> Any:
    """The value that ``json.loads`` gives, where arrays of integers may be `Integers`.

    Raises what ``json.loads`` does, and ValueError for a name that comes twice in an object and for
    too many lists and objects: each takes longer to make, and more memory, than the bytes that say
    it.
    """
    if len(data) <= _CHUNK:
        return json.loads(data, object_pairs_hook=_members)
    return _ChunkDecoder().decode(data.decode(json.detect_encoding(data), "surrogatepass"))


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of an object by name.

    Raises ValueError for a name that comes twice: a parser would take the last one, and its sender
    may mean the first.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0][:100]!r} comes twice")
    return members


class _ChunkDecoder(json.JSONDecoder):
    """json's own decoder in Python, with arrays of our own.

    Whatever is long in a body is an array of numbers or a text. The numbers of an array go through
    the C parser in chunks of 64 Ki characters, a text as one.
    """

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._object)
        self._containers_left = _MAX_CONTAINERS
        self.parse_array = self._array
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _count_container(self) -> None:
        self._containers_left -= 1
        if self._containers_left < 0:
            raise ValueError(f"it holds more than {_MAX_CONTAINERS} lists and objects")

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count_container()
        return _members(pairs)

    def _array(
        self, text_and_start: tuple[str, int], scan_once: Callable[[str, int], tuple[Any, int]]
    ) -> tuple[list[Any], int]:
        """The array that begins before ``start``, and the offset after it."""
        self._count_container()
        text, start = text_and_start
        offset = _after_blanks(text, start)
        if text[offset : offset + 1] == "]":
            return [], offset + 1
        values: list[Any] = Integers()
        holds_others = False
        while True:
            numbers_end = _end_of_numbers(text, offset)
            if numbers_end > offset:
                numbers = json.loads(f"[{text[offset:numbers_end]}]")
                holds_others = holds_others or set(map(type, numbers)) != {int}
                values += numbers
                offset = numbers_end
            else:
                holds_others = True
                try:
                    value, offset = scan_once(text, offset)
                except StopIteration as end:
                    raise JSONDecodeError("Expecting value", text, end.value) from None
                values.append(value)
            offset = _after_blanks(text, offset)
            delimiter = text[offset : offset + 1]
            if delimiter == "]":
                return list(values) if holds_others else values, offset + 1
            if delimiter != ",":
                raise JSONDecodeError("Expecting ',' delimiter", text, offset)
            offset = _after_blanks(text, offset + 1)


def _end_of_numbers(text: str, start: int) -> int:
    """The offset after the numbers that come next, of a comma or the end; <= start: none do."""
    found = _NUMBERS.match(text, start, start + _CHUNK)
    assert found is not None  # it matches nothing, too
    end = found.end()
    return end if text[end : end + 1] == "]" else text.rfind(",", start, end)


def _after_blanks(text: str, offset: int) -> int:
    found = _BLANKS.match(text, offset)
    assert found is not None
    return found.end()
