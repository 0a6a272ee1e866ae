"""The server's status: whether it is alive, whether it generates, and the status page.

The page, `/`, is one answer with its style and scripts in it. It and programs read the engine's
state from `/status`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from rollout.engine.metrics import EngineStatus
from rollout.engine.protocol import Engine
from rollout.errors import EngineStateError
from rollout.report.learned import SOURCES
from rollout.report.page import CHARTS, STYLE, csp_hash
from rollout.server.errors import DrainingError, QueueFullError
from rollout.server.http_metrics import Latency
from rollout.server.streams import SampleRequest
from rollout.types import SamplingParams

if TYPE_CHECKING:
    from rollout.server.serving import Serving

_FOLDER = Path(__file__).with_name("page")
_WAIT_SECONDS = 0.25
_FRESH_SECONDS = 0.05
_TOKEN_SECONDS = 20.0
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class KnownStatus:
    """``status``: as it was ``age`` seconds ago."""

    status: EngineStatus
    age: float


class StatusCache:
    """The engine's last status. Used on one event loop.

    The engine answers between two steps. `latest` waits at most a quarter of a second for it, and
    then returns the former status with its age.
    """

    def __init__(
        self,
        first: EngineStatus,
        call: Callable[[Callable[[Engine], EngineStatus]], Awaitable[EngineStatus]],
    ) -> None:
        """``first``: as it is now. ``call``: runs a function of the engine between two steps."""
        self._call = call
        self._status = first
        self._taken = time.monotonic()
        self._coming: asyncio.Task[None] | None = None

    async def latest(self) -> KnownStatus:
        """Raises what the engine's loop does when it is closed or broken."""
        if time.monotonic() - self._taken > _FRESH_SECONDS:
            if self._coming is None or self._coming.done():
                self._coming = asyncio.create_task(self._take())
            done, _ = await asyncio.wait({self._coming}, timeout=_WAIT_SECONDS)
            for task in done:
                task.result()
        return KnownStatus(self._status, time.monotonic() - self._taken)

    async def _take(self) -> None:
        self._status = await self._call(lambda engine: engine.status())
        self._taken = time.monotonic()


class StatusBody(BaseModel):
    """``engine`` as it was ``age`` seconds ago: it answers between two steps or updates."""

    model: str
    uptime: float  # seconds
    unfinished: int  # requests admitted and not yet answered whole
    draining: bool  # no new ones are taken
    age: float  # seconds
    latency: Latency
    saved_seconds: float | None  # by drafts; of several replicas the mean; null: not measured
    saved_error_seconds: float | None  # half of the 95 % interval
    speedup: str  # a sentence on both
    engine: EngineStatus


def public_routes(serving: Serving) -> APIRouter:
    """The page needs no key: it is the same for every server, and asks `/status` for the rest."""
    router = APIRouter()
    html, headers = _page()

    @router.get("/ping", response_class=Response, tags=["health"])
    @router.get("/health", response_class=Response, tags=["health"])
    async def health() -> Response:
        """200 while requests are taken, if only to wait; 503 once the engine has failed or the
        server is about to end."""
        _require_alive(serving)
        return Response()

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return router


def user_routes(serving: Serving) -> APIRouter:
    """`/health_generate` and `/status`, which take the key."""
    router = APIRouter()

    @router.get("/health_generate", response_class=Response, tags=["health"])
    async def health_generate() -> Response:
        """200 when a token is generated, for this call or for any other request; 503 with the
        reason where the engine cannot run, and after 20 seconds without a token."""
        _require_alive(serving)
        try:
            async with asyncio.timeout(_TOKEN_SECONDS):
                await _until_token(serving)
        except TimeoutError:
            raise EngineStateError(f"no token was generated for {_TOKEN_SECONDS} seconds") from None
        return Response()

    @router.get("/status", tags=["status"])
    async def status() -> StatusBody:
        known = await serving.status_cache.latest()
        total, beside = known.status.total, len(known.status.replicas) or 1
        saving = total.saving(total.total_ms / 1e3 / beside, beside)
        return StatusBody(
            model=serving.model_name,
            uptime=serving.uptime,
            unfinished=serving.num_unfinished,
            draining=serving.is_draining,
            age=known.age,
            latency=serving.http_metrics.latency,
            saved_seconds=saving.seconds if saving.is_measured else None,
            saved_error_seconds=saving.error_seconds if saving.is_measured else None,
            speedup=str(saving),
            engine=known.status,
        )

    return router


async def _until_token(serving: Serving) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True)
    before = await serving.call(_tokens)
    probe = SampleRequest(prompt_ids=[0], params=params, is_probe=True)
    sample = asyncio.ensure_future(serving.generate([probe]))
    try:
        while not sample.done():
            await asyncio.wait({sample}, timeout=_POLL_SECONDS)
            if await serving.call(_tokens) > before:  # perhaps of an earlier request
                return
        await sample
    except QueueFullError:
        while await serving.call(_tokens) == before:
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        sample.cancel()


def _tokens(engine: Engine) -> int:
    if not engine.can_run:
        raise EngineStateError(engine.unavailable_reason)
    return engine.metrics().generated_tokens


def _require_alive(serving: Serving) -> None:
    if serving.is_draining:
        raise DrainingError("the server is shutting down")
    serving.loop.require_open()


def _page() -> tuple[str, dict[str, str]]:
    """The page, and headers that allow only its own style, script and origin."""
    style = STYLE + _read("page.css")
    script = f"{CHARTS}const SOURCES = {json.dumps(SOURCES)};\n{_read('page.js')}"
    html = _read("page.html").replace("{{style}}", style).replace("{{script}}", script)
    policy = {
        "default-src": "'none'",
        "style-src": csp_hash(style),
        "script-src": csp_hash(script),
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
