"""Answers to whoever is still waiting when the server ends."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.server.errors import DrainingError, ErrorResponse
from rollout.server.serving import Serving


class AnswerAtEnd:
    """ASGI middleware: 503 for a request that is cancelled because the server ends.

    An answer that has begun breaks off, which its reader can tell from one that is complete.
    """

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not self._serving.is_draining:
                raise
            if not has_begun:
                ended = DrainingError("the server is shutting down: this was not finished")
                await ErrorResponse(ended)(scope, receive, send)
