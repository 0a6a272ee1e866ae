"""Whether the server is alive, and whether it generates."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from rollout.engine.protocol import Engine
from rollout.errors import EngineStateError
from rollout.server.delta_stream import SampleRequest
from rollout.server.errors import DrainingError, QueueFullError
from rollout.server.serving import Serving
from rollout.types import SamplingParams

_SECONDS = 20.0
_POLL_SECONDS = 0.25


def public_routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while requests are taken, if only to wait; 503 once the engine has failed or the
        server is about to end."""
        _require_alive(serving)
        return Response()

    return router


def user_routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health_generate", response_class=Response)
    async def health_generate() -> Response:
        """200 when a token is generated, for this call or for any other request; 503 with the
        reason where the engine cannot run, and after 20 seconds without a token."""
        _require_alive(serving)
        try:
            async with asyncio.timeout(_SECONDS):
                await _until_token(serving)
        except TimeoutError:
            raise EngineStateError(f"no token was generated for {_SECONDS} seconds") from None
        return Response()

    return router


async def _until_token(serving: Serving) -> None:
    """Raises EngineStateError where the engine cannot run."""
    params = SamplingParams(temperature=0, max_new_tokens=1, ignore_eos=True)
    before = await serving.call(_tokens)
    sample = asyncio.ensure_future(serving.generate([SampleRequest(prompt_ids=[0], params=params)]))
    try:
        while not sample.done():
            await asyncio.wait({sample}, timeout=_POLL_SECONDS)
            if await serving.call(_tokens) > before:  # perhaps for those who came earlier
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
