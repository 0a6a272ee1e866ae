"""`/v1/models`: the one that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from rollout.server.openai.route import ModelNotFoundError, OpenAIRoute
from rollout.server.serving import Serving


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(serving)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        require_model(serving, name)
        return _model(serving)

    return router


def require_model(serving: Serving, name: str | None) -> None:
    """Raises ModelNotFoundError unless ``name`` is the served model's; None asks for no other."""
    if name not in (None, serving.model_name):
        raise ModelNotFoundError(
            f"the model {name!r} does not exist: this server has {serving.model_name!r}"
        )


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": int(serving.started),
        "owned_by": "specrollout",
        "max_model_len": serving.max_context_len,  # vLLM's field
    }
