"""Malformed requests, many clients that send them, and a server's faults in its answers.

A kind of request is a function of a `random.Random` that returns the bytes of one, so a seed names
all of them. Many are good requests with one thing spoiled; a few of those stay good.
"""

from __future__ import annotations

import asyncio
import enum
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_PARAMS = {"max_new_tokens": 4, "temperature": 0.8, "top_k": 5, "stop": ["nine"], "n": 2}
_BODIES: dict[str, dict[str, Any]] = {
    "/generate": {
        "input_ids": [5, 6, 7], "sampling_params": _PARAMS, "return_logprob": True, "stream": True,
        "logprob_start_len": 0, "top_logprobs_num": 2, "rid": "a",
    },
    "/v1/completions": {
        "model": "m", "prompt": "one two", "max_tokens": 4, "n": 2, "logprobs": 1,
        "stop": ["nine"], "seed": 3, "stream": True, "logit_bias": {"7": 1.5},
    },
    "/v1/chat/completions": {
        "model": "m", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 4,
        "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True},
    },
    "/add_external_corpus": {"corpus_id": "odd", "file_path": "../../etc/passwd"},
    "/update_weights_from_disk": {"model_path": "/etc", "load_format": "auto"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AAAA"], "load_format": None},
}  # fmt: skip
"""By path. The last three are refused as they are: nothing here may change the engine."""

_ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, 0.5, float("nan"),
    float("inf"), "", "x", "\ud800", "\0", "é" * 5, "9" * 5000, [], {}, [[]], [None], ["\udc00"],
    [2**40], [-1], {"": 0}, {"\ud800": 1}, [1.5], ["5"],
)  # fmt: skip
_PATHS = (
    "/%00", "/generate/", "//generate", "/../../etc/passwd", "/%2e%2e/status", "/" + "a" * 20_000,
    "/generate?" + "a=" * 2000, "/%zz", "/%ff%fe", "/\xe9", "*", "", "http://elsewhere/generate",
)  # fmt: skip
_HEADERS = (
    "X: " + "a" * 70_000, "\r\n".join(f"X-{i}: {i}" for i in range(3000)), "X: a\0b", ": nothing",
    "no colon", "X y: z", "Authorization: Bearer \xff\xfe", "Expect: 200-maybe",
    "Upgrade: websocket\r\nSec-WebSocket-Key: x", "Content-Encoding: gzip", "Content-Length: 3",
    "Transfer-Encoding: chunked", "Transfer-Encoding: xchunked", "Content-Type: a/b/c", "Host: b",
)  # fmt: skip


class Ending(enum.Enum):
    """The client's next move when it has sent everything."""

    WAITS = "waits"
    HALF_CLOSES = "half-closes"  # as the server may take what it sent for a beginning
    LEAVES = "leaves"


def _request(
    path: str, body: bytes, method: str = "POST", header: str = "", length: Any = None
) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\n{header}"
    head += f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode("latin-1") + body


def _good(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice(list(_BODIES))
    return path, json.dumps(_BODIES[path]).encode()


def _fields(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key within it."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    below = [pair for _, each in items if isinstance(each, dict | list) for pair in _fields(each)]
    return [(value, key) for key, _ in items] + below


def _odd_value(rng: random.Random) -> bytes:
    path, body = _good(rng)
    spoiled = json.loads(body)
    container, key = rng.choice(_fields(spoiled))
    container[key] = rng.choice(_ODD_VALUES)
    return _request(path, json.dumps(spoiled).encode())


def _missing_fields(rng: random.Random) -> bytes:
    path, body = _good(rng)
    fields = json.loads(body)
    left = rng.sample(sorted(fields), rng.randrange(len(fields)))
    return _request(path, json.dumps({key: fields[key] for key in left}).encode())


def _broken_json(rng: random.Random) -> bytes:
    path, body = _good(rng)
    at = rng.randrange(len(body))
    broken = (
        body[:at], body[:at] + rng.randbytes(1) + body[at:], body + body, body.replace(b'"', b"'"),
        body[:-1] + b",}", b"[" + body + b"]", b"", body.decode().encode("utf-16"),
        b"\xef\xbb\xbf" + body, rng.randbytes(len(body)), body.replace(b"4", b"1e999"),
        body.replace(b"4", b"7" * 5000),
    )  # fmt: skip
    return _request(path, rng.choice(broken))


def _deep_nesting(rng: random.Random) -> bytes:
    path, _ = _good(rng)
    depth = rng.choice([500, 5_000, 100_000])
    nested = b"[" * depth + b"]" * depth * rng.randint(0, 1)
    field = rng.choice([b"input_ids", b"prompt", b"messages", b"sampling_params", b"x"])
    return _request(path, b'{"' + field + b'":' + nested + b"}")


def _wrong_line(rng: random.Random) -> bytes:
    path, body = _good(rng)
    method = rng.choice(["GET", "PUT", "DELETE", "OPTIONS", "BREW", "get", "CONNECT"])
    return (
        _request(path, body, method) if rng.random() < 0.5 else _request(rng.choice(_PATHS), body)
    )


def _odd_header(rng: random.Random) -> bytes:
    return _request(*_good(rng), header=f"{rng.choice(_HEADERS)}\r\n")


def _wrong_length(rng: random.Random) -> bytes:
    lengths = ("-1", "abc", "", "1e3", "0x10", 2**63, 10**30, "5, 6", "+5")
    return _request(*_good(rng), length=rng.choice(lengths))


def _bad_chunks(rng: random.Random) -> bytes:
    path, body = _good(rng)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    sizes = (b"zz", b"-5", b"f" * 17, b"", b"%x" % (len(body) - 3), b"%x;" % 3 + b"x" * 70_000)
    return head.encode() + rng.choice(sizes) + b"\r\n" + body + b"\r\n0\r\n\r\n"


def _not_http(rng: random.Random) -> bytes:
    return rng.choice([
        b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" + rng.randbytes(200), rng.randbytes(2000), b"A" * 100_000,
    ])  # fmt: skip


def _gone(rng: random.Random) -> bytes:
    """Some or all of a good request."""
    whole = _request(*_good(rng))
    return whole[: rng.randint(1, len(whole))]


KINDS: dict[str, tuple[Callable[[random.Random], bytes], Ending]] = {
    "odd value": (_odd_value, Ending.WAITS),
    "missing fields": (_missing_fields, Ending.WAITS),
    "broken JSON": (_broken_json, Ending.WAITS),
    "deep nesting": (_deep_nesting, Ending.WAITS),
    "wrong method or path": (_wrong_line, Ending.WAITS),
    "odd header": (_odd_header, Ending.HALF_CLOSES),
    "wrong length": (_wrong_length, Ending.HALF_CLOSES),
    "bad chunks": (_bad_chunks, Ending.HALF_CLOSES),
    "not HTTP": (_not_http, Ending.HALF_CLOSES),
    "client gone": (_gone, Ending.LEAVES),
}


async def send_malformed(
    port: int, count: int, *, num_clients: int, timeout: float
) -> dict[str, Counter[str]]:
    """Send requests of all kinds in turn, each over a connection of its own.

    ``timeout``: seconds that a client waits for its answer. Returns, by kind, how often each status
    was the answer; "closed": there was none, "hangs": not even an end of the connection.
    """
    rng = random.Random(0)
    room = asyncio.Semaphore(num_clients)
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}

    async def send(kind: str, raw: bytes, ending: Ending) -> None:
        async with room:
            try:
                async with asyncio.timeout(timeout):
                    status = await _status(port, raw, ending)
            except TimeoutError:
                status = "hangs"
        found[kind][status] += 1
        if is_fault(status, ending):
            print(kind, status, raw[:300], flush=True)

    kinds = list(KINDS.items())
    chosen = (kinds[index % len(kinds)] for index in range(count))
    await asyncio.gather(*(send(kind, make(rng), ending) for kind, (make, ending) in chosen))
    return found


def is_fault(status: str, ending: Ending) -> bool:
    """Whether the server is to blame: 501 is its answer to codings that it does not know."""
    if status == "closed":
        return ending is Ending.WAITS
    return status == "hangs" or (status >= "500" and status != "501")


async def _status(port: int, raw: bytes, ending: Ending) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        if ending is Ending.LEAVES:
            await asyncio.sleep(random.uniform(0, 0.05))
            writer.transport.abort()
            return "closed"
        answer = b""
        with suppress(OSError):  # the server closed while more was sent; its answer may be there
            await writer.drain()
            if ending is Ending.HALF_CLOSES:
                writer.write_eof()
        with suppress(OSError):
            answer = await reader.read(2**10)
            while await reader.read(2**16):
                pass
        words = answer.split(b" ", 2)
        return words[1].decode() if len(words) > 1 and answer.startswith(b"HTTP/") else "closed"
    finally:
        writer.close()
