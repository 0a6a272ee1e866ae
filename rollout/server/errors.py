"""HTTP answers to errors: a status, and a body of OpenAI's shape that every dialect's clients
read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from rollout.errors import (
    EngineStateError,
    InvalidInputError,
    OutOfMemoryError,
    RolloutError,
    WeightUpdateError,
)
from rollout.server.json_route import JsonAnswer


class QueueFullError(RolloutError):
    """The queue holds `server.max_queue` samples, running and waiting."""


class ModelNotFoundError(RolloutError):
    """A model is named that is not the one this server has."""


class DrainingError(RolloutError):
    """The server is shutting down and refuses new requests."""


class TooLargeError(HTTPException):
    """A body of more bytes than are allowed.

    An HTTPException, so that it can be raised while FastAPI reads the body.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            413,
            f"the body has more than the {max_bytes} bytes that are allowed",
            # The rest of the body is not read, so nothing else can come over this connection.
            {"Connection": "close"},
        )


class EncodedError(HTTPException):
    """A request's body is compressed."""

    def __init__(self, coding: str) -> None:
        super().__init__(
            415,
            f"Content-Encoding: {coding[:_SHOWN]} is not unpacked: send the body as it is",
            {"Accept-Encoding": "identity", "Connection": "close"},
        )


class TooManyConnectionsError(HTTPException):
    """`server.max_connections` connections are open."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "as many connections are open as server.max_connections allows: try again later",
            {"Connection": "close"},
        )


# The first that fits decides.
_STATUS: list[tuple[type[RolloutError], int]] = [
    (InvalidInputError, 422),
    (OutOfMemoryError, 422),  # the request cannot fit even alone
    (ModelNotFoundError, 404),
    (QueueFullError, 429),
    (DrainingError, 503),
    (EngineStateError, 503),
    (WeightUpdateError, 409),
    (RolloutError, 500),
]
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "too_large_error",
    429: "rate_limit_error",
}
_RETRY_SECONDS = {429: 1, 503: 5}
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SHOWN = 200  # characters of a path
_LEFT = 499  # for the log: the client has left
UNION_MEMBER = re.compile(r"str|int|float|bool|.*[^a-z0-9_].*")
"""The name of a type, as pydantic has it in the location of an error."""


def error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status and ``{"error": ...}`` of any error; an unexpected one shows its name alone.

    For a body that does not validate, it names the first wrong field, without its value, which may
    be long.
    """
    if isinstance(error, RequestValidationError):
        if error.errors()[0]["type"] == "json_invalid":
            return 400, _body(400, "the body is not JSON")
        location, message = _first_wrong(error.errors())
        param = ".".join(location)
        return 422, _body(422, f"{param}: {message}", param)
    if isinstance(error, HTTPException):
        return error.status_code, _body(error.status_code, str(error.detail))
    if isinstance(error, RolloutError):
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        field = error.field if isinstance(error, InvalidInputError) else None
        return status, _body(status, str(error), field)
    if isinstance(error, ClientDisconnect):
        return _LEFT, _body(_LEFT, "the client has left")
    return 500, _body(500, f"an internal error ({type(error).__name__}): see the server's log")


def _first_wrong(errors: Sequence[Mapping[str, Any]]) -> tuple[list[str], str]:
    """The first invalid field and the reason; of a union's errors the one that got furthest."""
    found: list[tuple[list[str], str]] = []
    for error in errors:
        location = error["loc"][1:] if len(error["loc"]) > 1 else error["loc"]
        parts = [str(part) for part in location]
        found.append(([part for part in parts if not UNION_MEMBER.fullmatch(part)], error["msg"]))
    first = found[0][0][:1]
    return max((each for each in found if each[0][:1] == first), key=lambda each: len(each[0]))


class ErrorResponse(JsonAnswer):
    def __init__(self, error: BaseException) -> None:
        status, body = error_body(error)
        headers: dict[str, str] = dict(getattr(error, "headers", None) or {})
        if status in _RETRY_SECONDS:
            headers["Retry-After"] = str(_RETRY_SECONDS[status])
        super().__init__(body, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of the application in the same shape."""

    async def answer(request: Request, error: Exception) -> ErrorResponse:
        if (
            isinstance(error, HTTPException)
            and error.status_code in (404, 405)
            and error.detail == HTTPStatus(error.status_code).phrase
        ):
            error = _unrouted(app, request)
        return ErrorResponse(error)

    expected = (RolloutError, HTTPException, RequestValidationError, ClientDisconnect)
    for kind in expected:
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, answer)  # and it is raised again, for the log


def _unrouted(app: FastAPI, request: Request) -> HTTPException:
    def takes(method: str) -> bool:
        scope = dict(request.scope) | {"method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in app.routes)

    path = request.url.path[:_SHOWN]
    allowed = ", ".join(filter(takes, _METHODS))
    if allowed:
        message = f"{path} does not take {request.method}, but {allowed}"
        return HTTPException(405, message, {"Allow": allowed})
    slash = "leave out the last /, or see " if path.endswith("/") else "see "
    return HTTPException(
        404, f"there is no {path}: {slash}GET /openapi.json for the calls there are"
    )


def _body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    default = "invalid_request_error" if status < 500 else "server_error"
    kind = _TYPES.get(status, default)
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
