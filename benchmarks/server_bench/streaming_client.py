"""One client of `/generate` with ``stream``, quick or slow to read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stream:
    """The answer one client got. ``rollout``: the last event; None when it left before."""

    status: int
    rollout: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)  # tokens known at each event


async def stream_generate(
    port: int,
    body: Mapping[str, Any],
    *,
    read_bytes: int = 2**16,
    pause: float = 0.0,
    leave_after_events: int | None = None,
    key: str | None = None,
) -> Stream:
    """Read the events of one request.

    Args:
        read_bytes, pause: a slow reader takes so much at a time, and so many seconds between.
        leave_after_events: closes the connection then.

    Raises ConnectionError when the server closes it in the middle of an answer.
    """
    content = json.dumps({**body, "stream": True}).encode()
    head = "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    started = time.perf_counter()
    # A small buffer here, so that what a slow reader does not take stays with the server.
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=max(read_bytes, 1024))
    try:
        writer.write(head.encode() + b"\r\n" + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        stream = Stream(int(answer.split(b" ", 2)[1]))
        if stream.status != 200:
            stream.error = json.loads(await reader.read())["error"]
            return stream
        buffered = b""
        async for part in _chunks(reader, read_bytes, pause):
            buffered += part
            *events, buffered = buffered.split(b"\n\n")
            for event in events:
                _take(stream, event, time.perf_counter() - started)
                if leave_after_events is not None and len(stream.sizes) >= leave_after_events:
                    writer.transport.abort()
                    stream.rollout = None
                    return stream
        stream.seconds = time.perf_counter() - started
        return stream
    finally:
        writer.close()


def _take(stream: Stream, event: bytes, seconds: float) -> None:
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        return
    said = json.loads(data)
    if "error" in said:
        stream.error = said["error"]
        return
    if not stream.sizes:
        stream.first_token_seconds = seconds
    stream.sizes.append(len(said["output_ids"]))
    stream.rollout = said


async def _chunks(reader: asyncio.StreamReader, read_bytes: int, pause: float) -> Any:
    """The parts of a chunked body."""
    while size := int(await reader.readline() or b"-1", 16):
        if size < 0:
            raise ConnectionError("the answer was cut short")
        left = size
        while left:
            part = await reader.read(min(read_bytes, left))
            if not part:
                raise ConnectionError("the answer was cut short")
            left -= len(part)
            yield part
            if pause:
                await asyncio.sleep(pause)
        await reader.readline()
