"""Errors in OpenAI's form, and `/v1/models`, which lists the one model there is."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError

from rollout.errors import InvalidInputError, OutOfMemoryError, PromptTooLongError
from rollout.server.errors import UNION_MEMBER, ModelNotFoundError, error_body
from rollout.server.json_route import JsonAnswer, JsonRoute
from rollout.server.serving import Serving


class OpenAIRoute(JsonRoute):
    """Bad input is 400 to these clients, not 422; an unknown model 404."""

    refuses_queries = False  # gateways add theirs, as api-version

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_or_refuse(request: Request) -> Response:
            try:
                return await answer(request)
            except RequestValidationError as error:
                location = error.errors()[0]["loc"]
                return _refusal(400, error, {"param": _top_level(location), "code": 400})
            except PromptTooLongError as error:
                return _refusal(400, error, {"code": "context_length_exceeded"})
            except (InvalidInputError, OutOfMemoryError) as error:
                return _refusal(400, error, {"code": 400})
            except ModelNotFoundError as error:
                return _refusal(404, error, _NO_MODEL)

        return answer_or_refuse


_NO_MODEL = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}


def _top_level(location: Sequence[str | int]) -> str | None:
    """The client's field of a location such as ``body, prompt, list[int], 3``, without unions."""
    names = [part for part in location[1:3] if isinstance(part, str)]
    if len(names) > 1 and UNION_MEMBER.fullmatch(names[0]):
        return names[1]
    return names[0] if names else None


def _refusal(status: int, error: Exception, fields: dict[str, Any]) -> Response:
    body = error_body(error)[1]
    return JsonAnswer({"error": {**body["error"], **fields}}, status)


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = [serving.model_name, serving.open_update.adapter_name]
        return {"object": "list", "data": [_model(serving, name) for name in names if name]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        serving.require_model(name)
        return _model(serving, serving.open_update.adapter_name or serving.model_name)

    return router


def _model(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(serving.started),
        "owned_by": "specrollout",
        "max_model_len": serving.max_context_len,  # vLLM's field
    }
