"""The HTTP application: which routes there are, who may call them, how errors look."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.routing import Route

from rollout import __version__
from rollout.server import generate, metrics, status
from rollout.server.body_fields import ERRORS
from rollout.server.errors import add_error_handlers
from rollout.server.http_metrics import CountRequests
from rollout.server.middleware import AnswerAtEnd, BodyLimit, RequireUser, SameOrigin, require_admin
from rollout.server.openai import chat, completions, route
from rollout.server.serving import Serving
from rollout.server.sglang import control, corpora, info, weights
from rollout.server.vllm import chat_prompt, lora, profile, tokenize, worker_calls
from rollout.server.vllm import control as vllm_control
from rollout.server.vllm import generate as token_generate
from rollout.server.vllm import info as vllm_info
from rollout.server.vllm import weights as vllm_weights

Routes = Callable[[Serving], APIRouter]

_DOCS_FILES = "/docs-files"  # the script and the style of /docs

USER: tuple[Routes, ...] = (
    status.user_routes,
    generate.routes,
    info.routes,
    control.user_routes,
    completions.routes,
    chat.routes,
    route.routes,
    tokenize.routes,
    chat_prompt.routes,
    token_generate.routes,
    vllm_info.routes,
    metrics.routes,
)
"""Routes that take the API key, if one is configured."""

ADMIN: tuple[Routes, ...] = (
    control.admin_routes,
    weights.routes,
    corpora.routes,
    control.memory_routes,
    vllm_control.routes,
    vllm_weights.routes,
    worker_calls.routes,
    profile.routes,
    lora.routes,
)
"""Routes that change the engine for all. They take the admin key, if any key is configured."""


def make_app(serving: Serving) -> FastAPI:
    config = serving.config
    app = FastAPIOffline(
        title="specrollout",
        version=__version__,
        redoc_url=None,
        static_url=_DOCS_FILES,
        redirect_slashes=False,
    )
    # Routes without a key tell nothing about the model or its users. /docs and /openapi.json are
    # the app's own.
    public = status.public_routes(serving)
    public_paths = _paths([app.router, public])
    app.include_router(public, responses=ERRORS)
    # The middleware asks for the keys; this lets readers of /docs enter one.
    has_keys = config.api_key is not None or config.admin_key is not None
    key = [Depends(HTTPBearer(auto_error=False))] if has_keys else []
    for routes in USER:
        app.include_router(routes(serving), dependencies=key, responses=ERRORS)
    for routes in ADMIN:
        admin = Depends(require_admin(config))
        app.include_router(routes(serving), dependencies=[*key, admin], responses=ERRORS)
    add_error_handlers(app)
    # The last is the outermost.
    app.add_middleware(BodyLimit, config=config)
    app.add_middleware(
        RequireUser, config=config, public_paths=public_paths, public_folder=f"{_DOCS_FILES}/"
    )
    app.add_middleware(SameOrigin, config=config)
    app.add_middleware(AnswerAtEnd, serving=serving)
    app.add_middleware(CountRequests, metrics=serving.http_metrics)
    return app


def _paths(routers: Sequence[APIRouter]) -> frozenset[str]:
    return frozenset(
        route.path for router in routers for route in router.routes if isinstance(route, Route)
    )
