"""Requests that no client should send: a server answers them with an error, and nothing else.

Every kind is a function of a `random.Random` that returns the bytes of one request, so a seed names
the whole crowd. Many bodies are good ones with one thing spoiled, and a few of those happen to stay
good: they generate a handful of tokens.
"""

from __future__ import annotations

import enum
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

_PARAMS = {
    "max_new_tokens": 4, "temperature": 0.8, "top_p": 0.9, "top_k": 5, "stop": ["nine"],
    "stop_token_ids": [3], "min_new_tokens": 1, "ignore_eos": True, "n": 2,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {
        "input_ids": [5, 6, 7], "sampling_params": _PARAMS, "return_logprob": True,
        "logprob_start_len": 0, "top_logprobs_num": 2, "stream": True, "rid": "a",
    },
    "/v1/completions": {
        "model": "m", "prompt": "one two", "max_tokens": 4, "temperature": 0.8, "n": 2,
        "logprobs": 1, "stop": ["nine"], "seed": 3, "stream": True, "logit_bias": {"7": 1.5},
    },
    "/v1/chat/completions": {
        "model": "m", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 4,
        "temperature": 0.8, "n": 2, "logprobs": True, "top_logprobs": 1, "stream": False,
        "stream_options": {"include_usage": True},
    },
}  # fmt: skip
"""By path: what would be answered, had nobody spoiled it."""

REFUSED_BODIES: dict[str, dict[str, Any]] = {
    "/add_external_corpus": {"corpus_id": "odd", "file_path": "../../etc/passwd"},
    "/remove_external_corpus": {"corpus_id": "of nobody"},
    "/update_weights_from_disk": {"model_path": "/etc", "load_format": "auto"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AAAA"], "load_format": None},
    "/get_weights_by_name": {"name": "of nobody", "truncate_size": 3},
}
"""By path: what would be refused even so. What could change the engine is not among them."""

GET_PATHS = ("/", "/health", "/status", "/metrics", "/v1/models", "/v1/loads", "/get_server_info",
             "/get_model_info", "/get_weight_version", "/list_external_corpora")  # fmt: skip
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "get", "CONNECT")


class Manner(enum.Enum):
    """The client's next move when it has sent everything."""

    WAITS = "waits"
    ENDS = "ends"  # closes its half, as what it sent may be a beginning to the server
    LEAVES = "leaves"  # closes the connection, soon


@dataclass(frozen=True, slots=True)
class BadRequest:
    kind: str
    raw: bytes  # what goes over the connection
    manner: Manner


class _Literal(str):
    """Goes into the JSON text as it stands."""


_ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -1e308, 0.5,
    float("nan"), float("inf"), float("-inf"), "", "x", "\ud800", "\udfff\ud800", "\0", "é" * 5,
    [], {}, [[]], [None], ["\udc00"], [2**40], [-1], {"": 0}, {"\ud800": 1}, [1.5], ["5"],
    "9" * 5000, _Literal("1e400"), _Literal("-0"), _Literal("01"), _Literal("0x10"),
    _Literal("9" * 6000), _Literal("[" * 300 + "]" * 300),
)  # fmt: skip


def malformed(count: int, seed: int = 0) -> Iterator[BadRequest]:
    """``count`` of them, of all kinds in turn."""
    randomness = random.Random(seed)
    kinds = list(_KINDS.items())
    for index in range(count):
        kind, make = kinds[index % len(kinds)]
        yield BadRequest(kind, make(randomness), _MANNERS.get(kind, Manner.WAITS))


def request(
    path: str,
    body: bytes = b"",
    *,
    method: str = "POST",
    content_type: str | None = "application/json",
    headers: str = "",
    length: int | str | None = None,
) -> bytes:
    """One HTTP/1.1 request; ``length`` instead of the body's own."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    if content_type is not None:
        head += f"Content-Type: {content_type}\r\n"
    head += f"Content-Length: {len(body) if length is None else length}\r\n{headers}\r\n"
    return head.encode("latin-1") + body


def _dump(body: Any) -> bytes:
    """JSON as Python's own writer gives it: NaN, Infinity and half surrogates included."""

    def mark(value: Any) -> Any:
        if isinstance(value, _Literal):
            return f"@@{value}@@"
        if isinstance(value, dict):
            return {key: mark(each) for key, each in value.items()}
        return [mark(each) for each in value] if isinstance(value, list) else value

    return re.sub(r'"@@(.*?)@@"', r"\1", json.dumps(mark(body))).encode()


def _good(randomness: random.Random) -> tuple[str, dict[str, Any]]:
    path = randomness.choice([*BODIES, *BODIES, *REFUSED_BODIES])
    body = BODIES[path] if path in BODIES else REFUSED_BODIES[path]
    return path, json.loads(json.dumps(body))


def _good_bytes(randomness: random.Random) -> tuple[str, bytes]:
    path, body = _good(randomness)
    return path, json.dumps(body).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below it."""
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    return [(value, key) for key, _ in items] + [p for _, each in items for p in _places(each)]


def _spoil(randomness: random.Random, odd: tuple[Any, ...]) -> bytes:
    path, body = _good(randomness)
    container, key = randomness.choice(_places(body))
    container[key] = randomness.choice(odd)
    return request(path, _dump(body))


def _half_surrogate(randomness: random.Random) -> bytes:
    path, body = _good(randomness)
    container, key = randomness.choice(_places(body))
    half = chr(randomness.randrange(0xD800, 0xE000))
    container[key] = randomness.choice([half, f"one {half} two", [half], {half: half}])
    return request(path, _dump(body))


def _missing_field(randomness: random.Random) -> bytes:
    path, body = _good(randomness)
    for key in randomness.sample(sorted(body), randomness.randint(1, len(body))):
        del body[key]
    return request(path, _dump(body))


def _not_an_object(randomness: random.Random) -> bytes:
    path, body = _good(randomness)
    return request(path, _dump(randomness.choice([*_ODD_VALUES, [body], json.dumps(body)])))


def _broken_json(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    at = randomness.randrange(len(body))
    return request(path, randomness.choice([
        body[:at],
        body[:at] + bytes([randomness.randrange(256)]) + body[at:],
        body[:at] + body[at + 1 :],
        body + body,
        body.replace(b'"', b"'"),
        body[:-1] + b",}",
        b"// why\n" + body,
        b"",
        b" \t\r\n",
    ]))  # fmt: skip


def _deep_nesting(randomness: random.Random) -> bytes:
    path, _ = _good(randomness)
    depth = randomness.choice([500, 1_000, 5_000, 100_000])
    opening, closing = randomness.choice(
        [(b"[", b"]"), (b'{"a":', b"}"), (b'{"messages":[', b"]}")]
    )
    nested = opening * depth + b"1" + closing * depth * randomness.randint(0, 1)
    field = randomness.choice([b"input_ids", b"prompt", b"messages", b"sampling_params", b"x"])
    return request(path, randomness.choice([nested, b'{"' + field + b'":' + nested + b"}"]))


def _wrong_encoding(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    at = randomness.randrange(len(body))
    return request(path, randomness.choice([
        body.decode().encode("utf-16"),
        body.decode().encode("utf-32-be"),
        b"\xef\xbb\xbf" + body,
        body[:at] + randomness.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\0"]) + body[at:],
        randomness.randbytes(len(body)),
    ]))  # fmt: skip


def _wrong_content_type(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    kind = randomness.choice([
        None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
        "multipart/form-data; boundary=x", "application/json; charset=utf-7", "a/b/c", ";;", "json",
        "application/octet-stream", "application/" + "x" * 3000,
    ])  # fmt: skip
    return request(path, body, content_type=kind)


def _false_compression(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    name = randomness.choice(["gzip", "br", "zstd", "deflate", "gzip, gzip", "?"])
    return request(path, body[1:], headers=f"Content-Encoding: {name}\r\n")


def _wrong_method(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    path = randomness.choice([path, *GET_PATHS])
    method = randomness.choice(METHODS if path not in GET_PATHS else METHODS[1:])
    return request(path, b"" if method == "HEAD" else body, method=method)


def _wrong_path(randomness: random.Random) -> bytes:
    _, body = _good_bytes(randomness)
    return request(randomness.choice([
        "/%00", "/generate/", "//generate", "/generate%2f..", "/../../etc/passwd", "/%2e%2e/status",
        "/generate?" + "a=" * 2000, "/" + "a" * 20_000, "/%", "/%zz", "/%ff%fe", "/\xe9", "*", "",
        "http://elsewhere/generate", "generate", "/v1/models/%00", "/v1/models/../../x", "/openapi",
    ]), body)  # fmt: skip


def _wrong_length(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    lengths = "-1", "abc", "", "1e3", "0x10", str(2**63), str(2**64), str(10**30), "5, 6", "+5"
    return request(path, body, length=randomness.choice(lengths))


def _two_lengths(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    header = randomness.choice([
        "Content-Length: 3\r\n", "Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding: identity\r\n", "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
    ])  # fmt: skip
    return request(path, body, headers=header)


def _bad_chunks(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    size = b"%x\r\n" % len(body)
    return head.encode() + randomness.choice([
        b"zz\r\n" + body,
        b"-5\r\n" + body,
        b"f" * 17 + b"\r\n" + body,
        b"\r\n" + body,
        b"%x\r\n" % (len(body) - 3) + body + b"\r\n0\r\n\r\n",
        size + body + b"0\r\n\r\n",
        size[:-2] + b";" + b"x" * 70_000 + b"\r\n" + body + b"\r\n0\r\n\r\n",
        b"0\r\n\r\n",
        b"1\r\n{\r\n" * 50 + b"0\r\n\r\n",
    ])  # fmt: skip


def _truncated_body(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    return request(path, body[: randomness.randrange(len(body))], length=len(body))


def _truncated_head(randomness: random.Random) -> bytes:
    whole = request(*_good_bytes(randomness))
    return whole[: randomness.randrange(whole.index(b"\r\n\r\n"))]


def _truncated_chunks(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + b"%x\r\n" % (len(body) + 9) + body


def _gone_at_once(randomness: random.Random) -> bytes:
    """A good request, of whose answer nobody waits for the end."""
    path = randomness.choice(list(BODIES))
    return request(path, _dump(BODIES[path]))


def _odd_headers(randomness: random.Random) -> bytes:
    path, body = _good_bytes(randomness)
    return request(path, body, headers=randomness.choice([
        "X: " + "a" * 70_000 + "\r\n",
        "".join(f"X-{i}: {i}\r\n" for i in range(3000)),
        "X: a\0b\r\n",
        ": nothing\r\n",
        "no colon\r\n",
        "X y: z\r\n",
        "Authorization: Bearer \xff\xfe\r\n",
        "Authorization: Basic OnB3\r\n",
        "Authorization: " + "Bearer " * 500 + "\r\n",
        "Expect: 200-maybe\r\n",
        "Upgrade: websocket\r\nSec-WebSocket-Key: x\r\n",
        "Cookie: " + "a=b;" * 3000 + "\r\n",
        "Range: bytes=9-1\r\n",
        "Host: other\r\n",
    ]))  # fmt: skip


def _no_http(randomness: random.Random) -> bytes:
    return randomness.choice([
        b"\r\n\r\n",
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\nHost\n\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + randomness.randbytes(200),  # TLS
        randomness.randbytes(randomness.randrange(1, 2000)),
        b"A" * 100_000,
    ])  # fmt: skip


_SPOILED: dict[str, tuple[Any, ...]] = {
    "odd_value": _ODD_VALUES,
    "not_finite": (float("nan"), float("inf"), float("-inf"), _Literal("1e999")),
    "huge_integer": (2**31, 2**63, 2**64, 10**30, -(10**30), _Literal("7" * 5000)),
}
_KINDS: dict[str, Callable[[random.Random], bytes]] = {
    kind: partial(_spoil, odd=odd) for kind, odd in _SPOILED.items()
} | {
    make.__name__.removeprefix("_"): make
    for make in (
        _broken_json, _half_surrogate, _missing_field, _not_an_object, _deep_nesting,
        _wrong_encoding, _wrong_content_type, _false_compression, _wrong_method, _wrong_path,
        _wrong_length, _two_lengths, _bad_chunks, _truncated_body, _truncated_head,
        _truncated_chunks, _gone_at_once, _odd_headers, _no_http,
    )
}  # fmt: skip
_ENDS = ("wrong_length", "two_lengths", "bad_chunks", "no_http")
_LEAVES = ("truncated_body", "truncated_head", "truncated_chunks", "gone_at_once")
_MANNERS = dict.fromkeys(_ENDS, Manner.ENDS) | dict.fromkeys(_LEAVES, Manner.LEAVES)
