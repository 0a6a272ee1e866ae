"""What a web page that its reader's browser has open may ask of this server: nothing.

A server on loopback without keys trusts whoever can connect, and every page of the web can make its
reader's browser connect. Browsers say where a request comes from; other programs do not.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.server.config import ServerConfig
from rollout.server.errors import ErrorResponse

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


class SameOrigin:
    """ASGI middleware: 403 for what the pages of other origins send, ``/`` excepted.

    That covers names that were made to lead here (DNS rebinding): on loopback without a key, a
    request must name this machine.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        own = f"[{config.host}]" if ":" in config.host else config.host
        self._hosts = _LOOPBACK | {own} if config.api_key is None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unavailable_reason = self._why_not(Request(scope)) if scope["type"] == "http" else ""
        if unavailable_reason:
            await ErrorResponse(HTTPException(403, unavailable_reason))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _why_not(self, request: Request) -> str:
        headers = request.headers
        host = headers.get("host", "")
        if self._hosts is not None and host and _without_port(host).lower() not in self._hosts:
            return "Host must name this machine: without an api key the server is for it alone"
        if request.url.path == "/":
            return ""
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "web pages of other origins may not call this server"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return "web pages of other origins may not call this server"
        return ""


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
