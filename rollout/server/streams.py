"""A request's tokens on the way to a client that may be slow, or leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from fastapi import Request as HttpRequest
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout.engine.engine_loop import OnTokens, RequestHandle
from rollout.errors import RolloutError
from rollout.server.errors import error_body
from rollout.server.json_route import json_bytes
from rollout.types import EmittedTokens, Request, Rollout, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    prompt_ids: Sequence[int]
    params: SamplingParams
    prompt_index: int = 0
    sample_index: int = 0
    request_seed: int | None = None  # instead of the one derived from params.seed and the indices
    rid: str | None = None  # the client's name for it, to abort it by; may be shared
    is_probe: bool = False  # of the server's health: its latency is not counted


def with_rid(samples: Sequence[SampleRequest], rid: str | None) -> Sequence[SampleRequest]:
    """The samples by the name that a client gives their call; None leaves them as they are."""
    return samples if rid is None else [replace(sample, rid=rid) for sample in samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens one sample got since its last delta: of one step, or of several."""

    index: int  # which of the samples asked for
    tokens: EmittedTokens = field(default_factory=EmittedTokens)
    rollout: Rollout | None = None  # with the last one

    def then(self, later: Delta) -> Delta:
        """Both as one, which takes over the tokens of this one."""
        self.tokens.extend(later.tokens)
        return replace(self, rollout=later.rollout)


class DeltaStream(AsyncIterator[Delta]):
    """The deltas of several samples as they come; ends after each has had its rollout.

    Deltas are joined until the reader takes them, so a slow reader holds at most the outputs.
    Raises a sample's error. The opener must call `aclose`, which aborts unfinished
    samples.
    """

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._handles: list[RequestHandle] = []
        self._ended = 0  # samples whose rollout the reader has
        self._lock = threading.Lock()
        # Guarded by the lock, filled on the engine's thread:
        self._pending: dict[int, Delta] = {}
        self._failure: BaseException | None = None

    def listener(self, index: int) -> OnTokens:
        """The callback for a sample's new tokens, which the engine's thread calls after each
        step."""

        def on_tokens(request: Request, first_new: int) -> None:
            self._put(Delta(index=index, tokens=request.emitted_since(first_new)))

        return on_tokens

    def watch(self, index: int, handle: RequestHandle) -> None:
        """Deliver the rollout of a sample, or its error, when it ends."""
        self._handles.append(handle)
        handle.future.add_done_callback(lambda future: self._on_done(index, future))

    async def ready(self) -> None:
        """Wait for the next delta without taking it. Raises a sample's error."""
        while True:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                if self._pending or self._ended == len(self._handles):
                    return
                self._ready.clear()
            await self._ready.wait()

    async def __anext__(self) -> Delta:
        await self.ready()
        with self._lock:
            if not self._pending:
                raise StopAsyncIteration
            delta = self._pending.pop(next(iter(self._pending)))
        self._ended += delta.rollout is not None
        return delta

    async def aclose(self) -> None:
        for handle in self._handles:
            handle.future.cancel()  # which aborts it; does nothing to one that has ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    # The engine's thread

    def _on_done(self, index: int, future: Future[Rollout]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._put(Delta(index=index, rollout=future.result()))
            return
        with self._lock:
            self._failure = self._failure or error
        self._wake()

    def _put(self, delta: Delta) -> None:
        with self._lock:
            was_empty = not self._pending
            former = self._pending.get(delta.index)
            self._pending[delta.index] = delta if former is None else former.then(delta)
        if was_empty:
            self._wake()

    def _wake(self) -> None:
        call_soon(self._event_loop, self._ready.set)


def call_soon(event_loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Run the function on the event loop, from any thread. A loop that has ended runs nothing."""
    with suppress(RuntimeError):
        event_loop.call_soon_threadsafe(function)


class EventStream(StreamingResponse):
    """A response of one event per object, then ``[DONE]``.

    A RolloutError becomes an event, since the status has been sent. The deltas are closed when the
    response ends, even if the generator never ran.
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
            yield b"data: " + json_bytes(each) + b"\n\n"
    except RolloutError as error:
        yield b"data: " + json_bytes(error_body(error)[1]) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def while_connected(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
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


async def open_stream(request: HttpRequest, deltas: DeltaStream) -> DeltaStream:
    """The stream with its first delta ready, so that a bad request still gets its status.

    Closed on failure."""
    try:
        await while_connected(request, deltas.ready())
    except BaseException:
        await deltas.aclose()
        raise
    return deltas


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
