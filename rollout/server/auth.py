"""Who may call what: the api key for every call, the admin key for those that change the engine."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.exceptions import HTTPException

from rollout.server.config import ServerConfig

Check = Callable[[Request], Awaitable[None]]


def require_user(config: ServerConfig) -> Check:
    """A dependency that lets through who has a key, or anyone where none is configured."""

    async def check(request: Request) -> None:
        if config.api_key is not None and not _has(request, config.api_key, config.admin_key):
            raise _unknown_key()

    return check


def require_admin(config: ServerConfig) -> Check:
    """A dependency that lets through who has the admin key.

    With an api key alone nobody has it; with no key at all anyone on this machine may call.
    """

    async def check(request: Request) -> None:
        if config.admin_key is not None:
            if _has(request, config.admin_key):
                return
            if config.api_key is not None and _has(request, config.api_key):
                raise HTTPException(403, "this call needs the admin key, not the api key")
            raise _unknown_key()
        if config.api_key is not None:
            if not _has(request, config.api_key):
                raise _unknown_key()
            raise HTTPException(
                403,
                "this call needs an admin key and the server has none: start it with "
                "SPECROLLOUT_ADMIN_KEY in its environment, or with server.admin_key",
            )

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
