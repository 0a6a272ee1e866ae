"""The HTTP application: which routes there are, who may call them, how errors look."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends, FastAPI

from rollout.server import health, metrics
from rollout.server.auth import require_admin, require_user
from rollout.server.errors import add_error_handlers
from rollout.server.http_metrics import CountRequests
from rollout.server.limits import BodyLimit
from rollout.server.openai import chat, completions, models
from rollout.server.page import page, status
from rollout.server.same_origin import SameOrigin
from rollout.server.serving import Serving
from rollout.server.sglang import control, corpora, generate, info, memory, weights

Routes = Callable[[Serving], APIRouter]

PUBLIC: tuple[Routes, ...] = (health.public_routes, page.routes)
"""Anyone who can connect may call these: they say nothing about the model or its users."""

USER: tuple[Routes, ...] = (
    health.user_routes,
    generate.routes,
    info.routes,
    control.user_routes,
    completions.routes,
    chat.routes,
    models.routes,
    metrics.routes,
    status.routes,
)
"""With the api key, where one is configured."""

ADMIN: tuple[Routes, ...] = (
    control.admin_routes,
    weights.routes,
    corpora.routes,
    memory.routes,
)
"""They change the engine for all: with the admin key, where any key is configured."""


def make_app(serving: Serving) -> FastAPI:
    app = FastAPI(title="specrollout", docs_url=None, redoc_url=None)
    app.add_middleware(SameOrigin, config=serving.config)
    app.add_middleware(BodyLimit, config=serving.config)
    app.add_middleware(CountRequests, metrics=serving.http_metrics)  # the last is the outermost
    add_error_handlers(app)
    for routes in PUBLIC:
        app.include_router(routes(serving))
    for routes in USER:
        app.include_router(routes(serving), dependencies=[Depends(require_user(serving.config))])
    for routes in ADMIN:
        app.include_router(routes(serving), dependencies=[Depends(require_admin(serving.config))])
    return app
