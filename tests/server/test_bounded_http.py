"""Requests that are never finished do not keep their connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

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


def test_heads_and_trailers_that_are_too_long_or_no_request(url):
    for head in (b"GET /" + b"a" * 2000, b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 2000,
                 b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n"):  # fmt: skip
        with connect(url) as connection:
            connection.sendall(head)
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 "), head
            assert is_let_go(connection, b"")
    with open_request(url, "POST", "/reads", {"Transfer-Encoding": "chunked"}) as connection:
        connection.sendall(b"5\r\nhello\r\n0\r\nX-Long: ")
        assert is_let_go(connection, b"a" * 100)


def let_go_with_part_of_a_head(url: str, start: bytes, drip: bytes) -> None:
    with connect(url) as connection:
        connection.sendall(start)
        assert is_let_go(connection, drip)


def let_go_with_a_body_that_goes_on_after_its_answer(url: str) -> None:
    with open_request(url, "POST", "/", {"Content-Length": "1000000"}) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert is_let_go(connection, b"a")


def answered_when_its_body_is_read_slowly(url: str) -> None:
    with open_request(url, "POST", "/reads", {"Content-Length": "3"}) as connection:
        for _ in range(3):
            time.sleep(Hurried.seconds)
            connection.sendall(b"a")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def answered_over_a_connection_that_is_used_again(url: str) -> None:
    with httpx.Client(base_url=url, timeout=HANG_SECONDS) as client:
        for _ in range(3):
            assert client.post("/reads", content=b"a" * 300_000).content == ANSWER
            time.sleep(0.6 * Hurried.seconds)


def test_requests_must_come_in_time_and_answers_need_not(app):
    """The clients are at work side by side, since each needs a second."""
    clients: list[Callable[[str], None]] = [
        partial(let_go_with_part_of_a_head, start=b"", drip=b""),
        partial(let_go_with_part_of_a_head, start=b"", drip=b"\r\n"),
        partial(let_go_with_part_of_a_head, start=b"GET / HTTP/1.1\r\nX-Slow: ", drip=b"a"),
        let_go_with_a_body_that_goes_on_after_its_answer,
        answered_when_its_body_is_read_slowly,
        answered_over_a_connection_that_is_used_again,
    ]
    with served(app, Hurried) as url, ThreadPoolExecutor(len(clients)) as threads:
        for client in [threads.submit(each, url) for each in clients]:
            client.result(HANG_SECONDS)


def request(path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_who_leaves_with_requests_that_wait_is_noticed(app, url, caplog):
    with connect(url) as connection:
        connection.sendall(request("/waits") + request("/echo", b"later") * 3)
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
