"""Bytes sent over a connection of their own, and what came back."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    status: int | None  # None: the connection was closed without an answer
    body: bytes
    is_whole: bool = True  # as long as was announced, or with a last chunk

    def json(self) -> Any:
        return json.loads(self.body)


async def send(
    port: int,
    raw: bytes,
    *,
    timeout: float,
    ends: bool = False,
    leave_after: float | None = None,
) -> Answer:
    """What the server says to it.

    Args:
        ends: closes the client's half of the connection when everything is sent.
        leave_after: seconds after which the client resets the connection, whatever has come.

    Raises TimeoutError when the server neither answers nor closes.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            writer.transport.abort()  # a reset, as of a client that was killed
            return Answer(None, b"")
        said = b""
        try:
            async with asyncio.timeout(timeout):
                await writer.drain()
                if ends:
                    with suppress(OSError):  # ended by the server, whose answer may be there
                        writer.write_eof()
                said = await _read_answer(reader)
        except ConnectionError:  # it was closed while more was sent
            pass
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
