"""Requests that are never finished do not keep their connections."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from rollout.server.bounded_http import BoundedHttp
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.http_raw import open_request

ANSWER = b"hello"


class Patient(BoundedHttp):
    max_bytes = 1000
    max_waiting = 8
    seconds = HANG_SECONDS


class Hurried(Patient):
    seconds = 0.5


class App:
    """Answers /echo with its body and /waits not before its client has left. Reads the body of
    /reads before it answers, which takes /slow longer than a head may."""

    def __init__(self) -> None:
        self.asked: list[str] = []  # paths of requests
        self.heard_of_leaving = threading.Event()

    async def __call__(self, scope, receive, send):
        self.asked.append(scope["path"])
        answer = ANSWER
        if scope["path"] in ("/reads", "/echo"):
            message = await receive()
            answer = message["body"]
            while message.get("more_body"):
                message = await receive()
                answer += message.get("body", b"")
        if scope["path"] == "/slow":
            await asyncio.sleep(3 * Hurried.seconds)
        if scope["path"] == "/waits":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.heard_of_leaving.set()
        body = answer if scope["path"] == "/echo" else ANSWER
        length = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def served(app: App, protocol: type[BoundedHttp]) -> Iterator[str]:
    """The URL of a server of that application."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=protocol, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        server.should_exit = True
        thread.join(HANG_SECONDS)
    assert not thread.is_alive()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def url(app: App) -> Iterator[str]:
    with served(app, Patient) as url:
        yield url


@pytest.fixture
def hurried_url(app: App) -> Iterator[str]:
    """Where heads, and the rest of bodies that were answered, must come soon."""
    with served(app, Hurried) as url:
        yield url


def is_let_go(connection: socket.socket, drip: bytes) -> bool:
    """Whether the server ends it although a byte comes now and then."""
    deadline = time.monotonic() + HANG_SECONDS
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
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), HANG_SECONDS)


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_head_that_does_not_end_in_time(hurried_url, start):
    with connect(hurried_url) as connection:
        connection.sendall(start)
        assert is_let_go(connection, b"a" if start else b"")


def test_empty_lines_are_no_request(hurried_url):
    with connect(hurried_url) as connection:
        assert is_let_go(connection, b"\r\n")


@pytest.mark.parametrize("head", [b"GET /", b"GET / HTTP/1.1\r\nX-Long: "])
def test_a_head_that_is_too_long(url, head):
    with connect(url) as connection:
        connection.sendall(head + b"a" * 2 * Patient.max_bytes)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert is_let_go(connection, b"")


def test_trailers_that_are_too_long(url):
    chunked = {"Transfer-Encoding": "chunked"}
    with open_request(url, "POST", "/reads", chunked) as connection:
        connection.sendall(b"5\r\nhello\r\n0\r\nX-Long: ")
        assert is_let_go(connection, b"a" * 100)


def test_a_body_that_goes_on_after_its_answer(hurried_url):
    with open_request(hurried_url, "POST", "/", {"Content-Length": "1000000"}) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert is_let_go(connection, b"a")


def test_who_is_waited_for_may_take_longer(hurried_url):
    """A body that is read, and an answer that comes late; stray bytes change nothing."""
    with open_request(hurried_url, "POST", "/reads", {"Content-Length": "3"}) as connection:
        for _ in range(3):
            time.sleep(Hurried.seconds)
            connection.sendall(b"a")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    with open_request(hurried_url, "GET", "/slow", {}) as connection:
        time.sleep(0.1)
        connection.sendall(b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def request(path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def bodies_of(connection: socket.socket) -> Iterator[bytes]:
    """The bodies of all answers, until the server ends the connection."""
    with connection.makefile("rb") as stream:
        while stream.readline():
            headers = http.client.parse_headers(stream)
            yield stream.read(int(headers["Content-Length"]))


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_that_is_offered_is_passed_over(url, caplog, protocol):
    """The bytes behind the head are the request's body, and then the next request."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol}
    with connect(url) as connection:
        connection.sendall(request("/echo", b"first", **upgrade))
        bodies = bodies_of(connection)
        assert next(bodies) == b"first"
        for part in (request("/echo", b"second", **upgrade), request("/echo", b"third")):
            connection.sendall(part[:-3])
            connection.sendall(part[-3:])
        assert [next(bodies), next(bodies)] == [b"second", b"third"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_tunnel_is_refused(url):
    with connect(url) as connection:
        connection.sendall(b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert is_let_go(connection, b"")


@pytest.mark.parametrize("resets", [False, True])
def test_who_leaves_with_requests_that_wait_is_noticed(app, url, caplog, resets):
    with connect(url) as connection:
        connection.sendall(request("/waits") + request("/echo", b"later") * 3)
        if resets:  # an RST, in the place of a FIN
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        wait_until(lambda: app.asked == ["/waits"])
    assert app.heard_of_leaving.wait(HANG_SECONDS)
    with httpx.Client(base_url=url, timeout=HANG_SECONDS) as client:
        assert client.get("/").content == ANSWER
    assert app.asked == ["/waits", "/"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_requests_that_wait_for_others_are_bounded(app, url):
    """The last that is taken says that the connection ends, so that the client sends the others
    over another one."""
    with connect(url) as connection:
        try:
            connection.sendall(request("/slow") + request("/echo", b"a") * 5000)
        except ConnectionResetError:
            pytest.fail("it was not read to the end")
        wait_until(lambda: len(app.asked) == 1)
        assert is_let_go(connection, b"")
    assert len(app.asked) <= 1 + Patient.max_waiting
    with connect(url) as connection:
        few = [str(number).encode() for number in range(Patient.max_waiting + 5)]
        connection.sendall(request("/reads") + b"".join(request("/echo", each) for each in few))
        answers = list(bodies_of(connection))
    assert answers == [ANSWER, *few[: Patient.max_waiting]]


def test_connections_are_used_again_and_bodies_may_be_long(hurried_url):
    with httpx.Client(base_url=hurried_url, timeout=HANG_SECONDS) as client:
        for _ in range(3):
            assert client.post("/reads", content=b"a" * 300_000).content == ANSWER
            time.sleep(0.6 * Hurried.seconds)
