"""Malformed requests sent by many clients at once, and what became of each."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .malformed import BadRequest, Manner


@dataclass(frozen=True, slots=True)
class Answer:
    status: int | None  # None: the connection was closed without an answer
    body: bytes
    is_whole: bool = True  # as long as was announced, or with a last chunk

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Outcome:
    request: BadRequest
    answer: Answer | None  # None: there was neither an answer nor an end to the connection

    @property
    def status(self) -> int | None:
        return None if self.answer is None else self.answer.status

    @property
    def trouble(self) -> str:
        """The server's fault in this outcome; empty when it did well."""
        if self.answer is None:
            return "no answer"
        status = self.answer.status
        if status is None:
            waits = self.request.manner is Manner.WAITS
            return "closed without an answer" if waits and not self.answer.body else ""
        if status >= 500 and status != 501:
            return f"status {status}"
        has_body = not self.request.raw.startswith(b"HEAD ")
        return "cut short" if has_body and not self.answer.is_whole else ""


async def send_all(
    port: int,
    requests: Iterable[BadRequest],
    *,
    num_clients: int,
    timeout: float,
) -> list[Outcome]:
    """Each over a connection of its own, ``num_clients`` at a time; in order.

    ``timeout``: seconds one client waits for its answer.
    """
    randomness = random.Random(0)
    room = asyncio.Semaphore(num_clients)

    async def send_one(request: BadRequest, leave_after: float | None) -> Outcome:
        async with room:
            try:
                return Outcome(request, await _send(port, request, timeout, leave_after))
            except TimeoutError:
                return Outcome(request, None)

    def patience(request: BadRequest) -> float | None:
        return randomness.uniform(0, 0.05) if request.manner is Manner.LEAVES else None

    return await asyncio.gather(*(send_one(each, patience(each)) for each in requests))


async def _send(
    port: int, request: BadRequest, timeout: float, leave_after: float | None
) -> Answer:
    """The server's answer; a client that leaves resets the connection, whatever has come.

    Raises TimeoutError when the server neither answers nor closes.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.raw)
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            writer.transport.abort()  # a reset, as of a client that was killed
            return Answer(None, b"")
        said = b""
        with suppress(ConnectionError):  # it was closed while more was sent
            async with asyncio.timeout(timeout):
                await writer.drain()
                if request.manner is Manner.ENDS:
                    with suppress(OSError):  # ended by the server, whose answer may be there
                        writer.write_eof()
                said = await _read_answer(reader)
        return _parse(said)
    finally:
        writer.close()


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    said = b""
    while part := await reader.read(2**16):
        said += part
        head, found, rest = said.partition(b"\r\n\r\n")
        if found and len(rest) >= _announced(head):
            break
    return said


def _announced(head: bytes) -> float:
    """Bytes of the body; infinity where the connection's end tells."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return float("inf")


def _parse(said: bytes) -> Answer:
    head, _, body = said.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        return Answer(None, said)
    is_chunked = b"\r\ntransfer-encoding: chunked" in head.lower()
    is_whole = body.endswith(b"0\r\n\r\n") if is_chunked else len(body) >= _announced(head)
    return Answer(int(words[1]), body, is_whole)
