"""ASGI middleware: keys, the size of bodies, pages of other origins, and answers at the end."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Set

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.server.config import ServerConfig
from rollout.server.errors import DrainingError, EncodedError, ErrorResponse, TooLargeError
from rollout.server.serving import Serving


class RequireUser:
    """ASGI middleware: 401 without a key, if an api key is configured.

    It runs before routing, so that clients without a key cannot send bodies or probe paths.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, public_paths: Set[str], public_folder: str
    ) -> None:
        """``public_paths``, and those below ``public_folder``, need no key."""
        self._app = app
        self._config = config
        self._public_paths = public_paths
        self._public_folder = public_folder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = (self._config.api_key, self._config.admin_key)
        if (
            self._config.api_key is None
            or scope["type"] != "http"
            or scope["path"] in self._public_paths
            or scope["path"].startswith(self._public_folder)
            or _has(Request(scope), *keys)
        ):
            await self._app(scope, receive, send)
        else:
            await ErrorResponse(_unknown_key())(scope, receive, send)


def require_admin(config: ServerConfig) -> Callable[[Request], Awaitable[None]]:
    """A dependency that requires the admin key.

    With an api key alone nobody has it; without keys anyone on this machine may call.
    """

    async def check(request: Request) -> None:
        if config.admin_key is None and config.api_key is None:
            return
        if config.admin_key is None:
            raise HTTPException(
                403,
                "this call needs an admin key and the server has none: start it with "
                "SPECROLLOUT_ADMIN_KEY in its environment, or with server.admin_key",
            )
        if _has(request, config.admin_key):
            return
        if config.api_key is not None:  # which came along, else it would not have got here
            raise HTTPException(403, "this call needs the admin key, not the api key")
        raise _unknown_key()

    return check


def _has(request: Request, *keys: str | None) -> bool:
    """Whether the request has one of the keys, compared in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = [hmac.compare_digest(given.encode(), key.encode()) for key in keys if key is not None]
    return scheme.lower() == "bearer" and any(same)


def _unknown_key() -> HTTPException:
    return HTTPException(
        401, "no valid key: send `Authorization: Bearer KEY`", {"WWW-Authenticate": "Bearer"}
    )


_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


class SameOrigin:
    """ASGI middleware: 403 for requests from pages of other origins, except to ``/``.

    A server on loopback without keys trusts every local program, and any web page can make a
    browser connect to it. Against DNS rebinding, such a server also requires that Host names this
    machine.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        own = f"[{config.host}]" if ":" in config.host else config.host
        self._hosts = _LOOPBACK | {own} if config.api_key is None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else ""
        if refusal:
            await ErrorResponse(HTTPException(403, refusal))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> str:
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


WEIGHT_PATHS = frozenset({"/update_weights_from_tensor"})
"""Paths whose bodies are tensors."""


class BodyLimit:
    """ASGI middleware: 413 for bodies over the limit, announced or received; 415 for compressed
    ones, whose size is unknown."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, config = dict(scope["headers"]), self._config
        coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if coding.lower() != "identity":
            await ErrorResponse(EncodedError(coding))(scope, receive, send)
            return
        has_weights = scope["path"] in WEIGHT_PATHS
        max_bytes = config.max_weights_body_bytes if has_weights else config.max_body_bytes
        announced = headers.get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > max_bytes:
            await ErrorResponse(TooLargeError(max_bytes))(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise TooLargeError(max_bytes)
            return message

        await self._app(scope, counted, send)


class AnswerAtEnd:
    """ASGI middleware: 503 for a request that shutdown cancels, unless its answer has begun."""

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
