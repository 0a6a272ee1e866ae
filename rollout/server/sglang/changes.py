"""Calls that change the engine, and sglang's way to answer them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from rollout.engine.protocol import Engine
from rollout.errors import RolloutError
from rollout.server.errors import error_body
from rollout.server.json_route import JsonAnswer
from rollout.server.serving import Serving

T = TypeVar("T")
Answer = dict[str, Any]


class RefusedError(Exception):
    """The engine refused a change, or failed in it.

    ``unavailable_reason``: why no step can run since.
    """

    def __init__(self, error: Exception, unavailable_reason: str = "") -> None:
        self.error = error
        self.unavailable_reason = unavailable_reason

    @property
    def response(self) -> JsonAnswer:
        """400, or the status of an HTTPException."""
        error = self.error
        status, body = error_body(error)
        message = str(error)
        if isinstance(error, HTTPException):
            message = error.detail
        else:
            status = 400
            if not isinstance(error, RolloutError):
                message = f"{type(error).__name__}: {error}"
        message = ". ".join([message, *getattr(error, "__notes__", [])])
        body["error"] |= {"message": message, "code": status}
        answer = {"success": False, "message": message, "state": self.unavailable_reason}
        return JsonAnswer(answer | body, status)


async def attempt(serving: Serving, function: Callable[[Engine], T]) -> T:
    """Its value, run between two steps. Raises RefusedError for what can be expected to fail."""

    def run(engine: Engine) -> T:
        try:
            return function(engine)
        except (RolloutError, OSError, HTTPException) as error:
            raise RefusedError(error, engine.unavailable_reason) from None

    return await serving.call(run)


async def change(serving: Serving, function: Callable[[Engine], Answer]) -> JsonAnswer:
    """Run it between two steps; answer ``{"success", "message", ...}`` with what it returns.

    Where the engine refuses or fails the status is 400, and ``state`` says why no step can run now
    (empty: one can).
    """
    try:
        return success(**await attempt(serving, function))
    except RefusedError as refused:
        return refused.response


def success(message: str = "", **answer: Any) -> JsonAnswer:
    return JsonAnswer({"success": True, "message": message} | answer)
