"""The status page: what the engine is doing, for people in `/` and for programs in `/status`.

The page is one answer with its style and scripts in it, which asks nobody but this server.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from rollout.engine.metrics import EngineStatus
from rollout.server.serving import Serving

_FOLDER = Path(__file__).parent


def page_routes(serving: Serving) -> APIRouter:
    """Needs no key: the page is the same for every server, and asks `/status` for the rest."""
    router = APIRouter(tags=["status"])
    html, headers = _page()

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return router


def _page() -> tuple[str, dict[str, str]]:
    """The page and the headers that hold it to what is in it: its own style, script and origin."""
    style = _read("page.css")
    script = _read("charts.js") + _read("page.js")
    html = _read("page.html").replace("{{style}}", style).replace("{{script}}", script)
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon, which is empty
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html, {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(inline: str) -> str:
    digest = hashlib.sha256(inline.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


class StatusBody(BaseModel):
    """``engine`` as it was ``age`` seconds ago: it answers between two steps or updates."""

    model: str
    uptime: float  # seconds
    unfinished: int  # requests admitted and not yet answered whole
    draining: bool  # no new ones are taken
    age: float  # seconds
    engine: EngineStatus


def status_routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get("/status")
    async def status() -> StatusBody:
        known = await serving.status_cache.latest()
        return StatusBody(
            model=serving.model_name,
            uptime=serving.uptime,
            unfinished=serving.num_unfinished,
            draining=serving.is_draining,
            age=known.age,
            engine=known.status,
        )

    return router
