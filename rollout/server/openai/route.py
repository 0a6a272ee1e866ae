"""How OpenAI's servers answer what is wrong with a request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError

from rollout.errors import InvalidInputError, OutOfMemoryError, RolloutError
from rollout.server.errors import error_body
from rollout.server.json_route import JsonAnswer, JsonRoute


class ModelNotFoundError(RolloutError):
    """A model is named that is not the one this server has."""


class OpenAIRoute(JsonRoute):
    """Bad input is 400 to these clients, not 422; an unknown model 404."""

    refuses_queries = False  # gateways add theirs, as api-version

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_or_refuse(request: Request) -> Response:
            try:
                return await answer(request)
            except RequestValidationError as error:
                place = error.errors()[0]["loc"]
                return _refusal(400, error, {"param": _top_level(place), "code": 400})
            except (InvalidInputError, OutOfMemoryError) as error:
                return _refusal(400, error, {"code": 400})
            except ModelNotFoundError as error:
                return _refusal(404, error, _NO_MODEL)

        return answer_or_refuse


_NO_MODEL = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}


def _top_level(place: Sequence[str | int]) -> str | None:
    """The client's field of a place such as ``body, prompt, list[int], 3``, without unions."""
    return str(place[1]) if len(place) > 1 and isinstance(place[1], str) else None


def _refusal(status: int, error: Exception, fields: dict[str, Any]) -> Response:
    body = error_body(error)[1]
    return JsonAnswer({"error": {**body["error"], **fields}}, status)
