"""`/docs`: Swagger UI from an installed package, so that the page needs no internet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse

from rollout.server.serving import Serving

_STATIC = files("fastapi_offline") / "static"


def routes(serving: Serving) -> APIRouter:
    """The page and its files, which need no key."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def page() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="specrollout",
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="/docs/favicon.png",
        )

    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        router.add_api_route(f"/docs/{name}", _file(name))
    return router


def _file(name: str) -> Callable[[], Awaitable[FileResponse]]:
    async def answer() -> FileResponse:
        return FileResponse(str(_STATIC / name))

    return answer
