"""HTTP/1.1 from clients that may never finish a request: bounded in number, bytes and time."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rollout.server.errors import ErrorResponse, TooManyConnectionsError

_MAX_BYTES = 128 * 1024
_SECONDS = 30.0
_REFUSED_SECONDS = 2.0  # for the head of a request that is refused, whatever it says
_MAX_REFUSED = 256
_MAX_WAITING = 64
_NO_HTTP = "Invalid HTTP request received."


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection that brings neither a request nor a part of a body in due time and size.

    The parser keeps what it has of a header until all of it has come, however long it is, copies it
    whenever more comes, and waits for the rest for ever; all that before a key can be asked for.
    From a request's head to the end of its answer the client may take its time: those who were let
    in may send weights over slow lines, and wait for tokens.

    Beyond uvicorn's ``limit_concurrency`` connections, another one is answered 503 and closed; a
    few hundred more are closed at once. Requests over those that are open go on.

    Requests that are sent before the one in front of them is answered wait in memory: behind the
    last that may, nothing is read, and its answer ends the connection. Meanwhile reading goes on,
    or nobody would notice that the client has left.

    Another protocol that a request offers to go on in is passed over, as HTTP allows.
    """

    max_bytes = _MAX_BYTES  # of a head, or of what is between and after the chunks of a body
    max_waiting = _MAX_WAITING  # requests behind the one that is being answered
    seconds = _SECONDS  # for a head; and for the rest of a body, once it has been answered

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # uvicorn's own way would refuse requests over open connections too.
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._unparsed_bytes = 0  # that came since the parser last had something to tell
        self._in_message = False  # between the end of a head and that of the body
        self._deadline: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None  # or being answered
        self._reads_no_more = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._max_connections is not None:
            excess = len(self.connections) - self._max_connections
            if excess > _MAX_REFUSED:
                transport.abort()
                return
            if excess > 0:
                self.app, self.seconds = _refuse, min(self.seconds, _REFUSED_SECONDS)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        # uvicorn would tell the last alone.
        for cycle in waiting if self._answered is None else [self._answered, *waiting]:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_message and not self._answers:
            self._start_deadline()
        self._unparsed_bytes += len(data)
        if not self._reads_no_more:
            self._parse(data)
        if self._unparsed_bytes <= self.max_bytes or self.transport.is_closing():
            return
        if self._in_message or self._answers:  # nothing may come between the parts of an answer
            self.transport.abort()
        else:
            self.send_400_response(f"Request header of more than {self.max_bytes} bytes.")

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            (parsed_bytes,) = upgrade.args
            self._parse_without_upgrade(data[parsed_bytes:])
        except httptools.HttpParserError:
            self.send_400_response(_NO_HTTP)

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """The head once more, for the parser takes what is behind it for another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.send_400_response(_NO_HTTP)
            return
        lines = [b" ".join((method, self.url, b"HTTP/" + version))]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._parse(b"\r\n".join([*lines, b"", b""]) + rest)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() or self._reads_no_more:
            return
        self._unparsed_bytes, self._in_message = 0, True
        self._cancel_deadline()
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()
        if len(self.pipeline) >= self.max_waiting:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._reads_no_more:
            return
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() or self._reads_no_more:
            return
        self._unparsed_bytes, self._in_message = 0, False
        self._cancel_deadline()
        super().on_message_complete()
        self._reads_no_more = len(self.pipeline) >= self.max_waiting

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if (self._in_message or self._unparsed_bytes) and not self.transport.is_closing():
            self._start_deadline()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await ErrorResponse(TooManyConnectionsError())(scope, receive, send)
