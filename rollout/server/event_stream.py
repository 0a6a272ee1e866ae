"""Server-sent events, and work for a client that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout.errors import RolloutError
from rollout.server.delta_stream import DeltaStream
from rollout.server.errors import error_body
from rollout.server.json_route import json_bytes


class EventStream(StreamingResponse):
    """Each object as one event, then ``[DONE]``.

    An error of ours comes as an event of its own, for the status has been sent. Whatever ends the
    response (its last event, a client that leaves), the deltas are closed when it returns; the
    generator, which never ran if the client was quick, need not do it.
    """

    media_type = "text/event-stream"

    def __init__(self, objects: AsyncGenerator[dict[str, Any], None], deltas: DeltaStream) -> None:
        self._objects, self._deltas = objects, deltas
        super().__init__(_events(objects), headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._deltas, aclosing(self._objects):
            await super().__call__(scope, receive, send)


async def _events(objects: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[bytes]:
    try:
        async for each in objects:
            yield _event(json_bytes(each))
    except RolloutError as error:
        yield _event(json_bytes(error_body(error)[1]))
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; cancels it and raises ClientDisconnect when the client has left.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
