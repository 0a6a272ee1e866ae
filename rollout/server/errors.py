"""From errors to HTTP: a status, and a body of OpenAI's shape that every dialect's clients read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rollout.errors import (
    EngineStateError,
    InvalidInputError,
    OutOfMemoryError,
    RolloutError,
    WeightUpdateError,
)

log = logging.getLogger(__name__)


class QueueFullError(RolloutError):
    """As many samples as `server.max_queue` allows are running and waiting."""


class DrainingError(RolloutError):
    """The server is about to end: it finishes what it has and takes nothing new."""


class TooLargeError(HTTPException):
    """A body of more bytes than are allowed. An HTTPException, so that it can be raised while
    FastAPI reads the body."""

    def __init__(self, max_bytes: int) -> None:
        # The rest of the body is not read, so nothing else can come over this connection.
        super().__init__(
            413,
            f"the body has more than the {max_bytes} bytes that are allowed",
            {"Connection": "close"},
        )


# The first that fits decides.
_STATUS: list[tuple[type[RolloutError], int]] = [
    (InvalidInputError, 422),
    (OutOfMemoryError, 422),  # the request cannot fit even alone
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


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and ``{"error": ...}`` of any error; an unexpected one shows its name alone."""
    if isinstance(error, HTTPException):
        return error.status_code, _body(error.status_code, str(error.detail))
    if isinstance(error, RolloutError):
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        param = error.field if isinstance(error, InvalidInputError) else None
        return status, _body(status, str(error), param)
    return 500, _body(500, f"an internal error ({type(error).__name__}): see the server's log")


def error_response(error: Exception) -> JSONResponse:
    status, body = error_body(error)
    headers: dict[str, str] = dict(getattr(error, "headers", None) or {})
    if status in _RETRY_SECONDS:
        headers["Retry-After"] = str(_RETRY_SECONDS[status])
    return JSONResponse(body, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    async def expected(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid_response(error)

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)  # and Starlette raises it again, for the log

    app.add_exception_handler(RolloutError, expected)
    app.add_exception_handler(HTTPException, expected)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)


def _invalid_response(error: RequestValidationError) -> JSONResponse:
    """The first thing wrong with a body or a query, without what it held, which may be long."""
    first: Mapping[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return JSONResponse(_body(400, "the body is not JSON"), 400)
    place = first["loc"][1:] if len(first["loc"]) > 1 else first["loc"]
    param = ".".join(str(part) for part in place)
    return JSONResponse(_body(422, f"{param}: {first['msg']}", param), 422)


def _body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    default = "invalid_request_error" if status < 500 else "server_error"
    kind = _TYPES.get(status, default)
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
