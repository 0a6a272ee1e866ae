"""uvicorn's HTTP/1.1 with a deadline for each request's head, and a limit on connections.

h11 bounds the size of heads and trailers, and reads no request before the one in front of it is
answered.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollout.server.errors import ErrorResponse, TooManyConnectionsError

_SECONDS = 30.0
_REFUSED_SECONDS = 2.0  # for the head of a request that will be refused
_MAX_REFUSED = 256


class HttpProtocol(H11Protocol):
    """Aborts connections whose next head, or rest of a body after its answer, does not come.

    From a head to the end of its answer the client may take any time: it may send weights over a
    slow line, and it waits for tokens.

    Beyond ``server.max_connections``, another connection gets 503 and is closed; 256 further ones
    are closed at once. Open connections are served as before.
    """

    seconds = _SECONDS
    refused_seconds = _REFUSED_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # uvicorn's own check would refuse requests over open connections too.
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - (self._max_connections or len(self.connections))
        if excess > _MAX_REFUSED:
            transport.abort()
        elif excess > 0:
            self.app, self.seconds = _refuse, self.refused_seconds
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # in the middle of an answer
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: HTTP lets servers ignore an offered upgrade."""

    def _set_deadline(self) -> None:
        """Start the deadline, or cancel it where the client owes nothing."""
        is_owed = self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE
        if not is_owed or self.transport.is_closing():
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await ErrorResponse(TooManyConnectionsError())(scope, receive, send)
