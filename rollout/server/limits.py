"""How much of a body is read."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.server.config import ServerConfig
from rollout.server.errors import EncodedError, ErrorResponse, TooLargeError

WEIGHT_PATHS = frozenset({"/update_weights_from_tensor"})
"""Their bodies are tensors."""


class BodyLimit:
    """ASGI middleware: 413 as soon as more than the allowed bytes are announced or have come.

    415 for compressed ones: a few bytes may become any number.
    """

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
