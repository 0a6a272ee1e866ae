"""Who may call what: the api key for every call, the admin key for those that change the engine."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Set

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.server.config import ServerConfig
from rollout.server.errors import ErrorResponse


class RequireUser:
    """ASGI middleware: 401 for whoever has no key, where an api key is configured.

    Here and not in the routes, so that no body is read, and no path told apart from one that does
    not exist, for whoever may not ask.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, public_paths: Set[str]) -> None:
        """``public_paths``: those that need no key."""
        self._app = app
        self._config = config
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_public = scope["type"] != "http" or scope["path"] in self._public_paths
        keys = (self._config.api_key, self._config.admin_key)
        if self._config.api_key is None or is_public or _has(Request(scope), *keys):
            await self._app(scope, receive, send)
        else:
            await ErrorResponse(_unknown_key())(scope, receive, send)


def require_admin(config: ServerConfig) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets through who has the admin key.

    With an api key alone nobody has it; with no key at all anyone on this machine may call.
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
    """Whether one of the keys came along. Takes the same time whatever came."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = [hmac.compare_digest(given.encode(), key.encode()) for key in keys if key is not None]
    return scheme.lower() == "bearer" and any(same)


def _unknown_key() -> HTTPException:
    return HTTPException(
        401, "no valid key: send `Authorization: Bearer KEY`", {"WWW-Authenticate": "Bearer"}
    )
