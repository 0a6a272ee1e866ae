"""Requests that are never finished do not keep their connections."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn

from rollout.server.bounded_http import BoundedHttp
from tests.helpers.http_raw import open_request

TIMEOUT = 30.0
ANSWER = b"hello"


class Hurried(BoundedHttp):
    most_bytes = 1000
    seconds = 0.5


async def app(scope, receive, send):
    """Reads the body of /reads before it answers, which takes /slow longer than a head may."""
    if scope["path"] == "/reads":
        while (await receive()).get("more_body"):
            pass
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * Hurried.seconds)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": ANSWER})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=Hurried, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + TIMEOUT
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        thread.join(TIMEOUT)
    assert not thread.is_alive()


def is_let_go(connection: socket.socket, drip: bytes) -> bool:
    """Whether the server ends it although a byte comes now and then."""
    deadline = time.monotonic() + TIMEOUT
    connection.settimeout(0.05)
    while time.monotonic() < deadline:
        try:
            connection.sendall(drip)
            if not connection.recv(4096):
                return True
        except TimeoutError:
            pass
        except OSError:
            return True
    return False


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), TIMEOUT)


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_head_that_does_not_end_in_time(url, start):
    with connect(url) as connection:
        connection.sendall(start)
        assert is_let_go(connection, b"a" if start else b"")


def test_empty_lines_are_no_request(url):
    with connect(url) as connection:
        assert is_let_go(connection, b"\r\n")


@pytest.mark.parametrize("head", [b"GET /", b"GET / HTTP/1.1\r\nX-Long: "])
def test_a_head_that_is_too_long(url, head):
    with connect(url) as connection:
        connection.sendall(head + b"a" * 2 * Hurried.most_bytes)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert is_let_go(connection, b"")


def test_trailers_that_are_too_long(url):
    chunked = {"Transfer-Encoding": "chunked"}
    with open_request(url, "POST", "/reads", chunked) as connection:
        connection.sendall(b"5\r\nhello\r\n0\r\nX-Long: ")
        assert is_let_go(connection, b"a" * 100)


def test_a_body_that_goes_on_after_its_answer(url):
    with open_request(url, "POST", "/", {"Content-Length": "1000000"}) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert is_let_go(connection, b"a")


def test_who_is_waited_for_may_take_longer(url):
    """A body that is read, and an answer that comes late; stray bytes change nothing."""
    with open_request(url, "POST", "/reads", {"Content-Length": "3"}) as connection:
        for _ in range(3):
            time.sleep(Hurried.seconds)
            connection.sendall(b"a")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    with open_request(url, "GET", "/slow", {}) as connection:
        time.sleep(0.1)
        connection.sendall(b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_connections_are_used_again_and_bodies_may_be_long(url):
    with httpx.Client(base_url=url, timeout=TIMEOUT) as client:
        for _ in range(3):
            assert client.post("/reads", content=b"a" * 300_000).content == ANSWER
            time.sleep(0.6 * Hurried.seconds)
