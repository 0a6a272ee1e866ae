"""Requests that are never finished do not keep their connections."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import httpx
import uvicorn

from rollout.server.http_protocol import HttpProtocol
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.http_raw import open_request

ANSWER = b"hello"


class Hurried(HttpProtocol):
    seconds = 0.5


class App:
    """Reads the body of /reads before it answers, and takes longer over /slow than a head may."""

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/reads":
            while (await receive()).get("more_body"):
                pass
        if scope["path"] == "/slow":
            await asyncio.sleep(3 * Hurried.seconds)
        length = [(b"content-length", b"%d" % len(ANSWER))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": ANSWER})


@contextmanager
def served(protocol: type[HttpProtocol]) -> Iterator[str]:
    """The URL of a server of `App`."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        App(), http=protocol, log_config=None, lifespan="off", h11_max_incomplete_event_size=1000
    )
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


def test_heads_and_trailers_that_are_too_long_or_no_request():
    with served(HttpProtocol) as url:
        for head in (
            b"GET /" + b"a" * 2000,
            b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 2000,
            b"\0\r\n",
        ):
            with connect(url) as connection:
                connection.sendall(head)
                assert connection.recv(4096).startswith(b"HTTP/1.1 400 "), head
                assert is_let_go(connection, b"")
        with open_request(url, "POST", "/reads", {"Transfer-Encoding": "chunked"}) as connection:
            connection.sendall(b"5\r\nhello\r\n0\r\nX-Long: ")
            assert is_let_go(connection, b"a" * 100)


def test_an_offered_upgrade_is_ignored_and_the_body_is_read():
    upgrade = {"Connection": "Upgrade", "Upgrade": "h2c", "Content-Length": "5"}
    with served(HttpProtocol) as url, open_request(url, "POST", "/reads", upgrade) as connection:
        connection.sendall(b"hello")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


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


def answered_although_the_answer_takes_long(url: str) -> None:
    assert httpx.get(f"{url}/slow", timeout=HANG_SECONDS).content == ANSWER


def answered_over_a_connection_that_is_used_again(url: str) -> None:
    with httpx.Client(base_url=url, timeout=HANG_SECONDS) as client:
        for _ in range(3):
            assert client.post("/reads", content=b"a" * 300_000).content == ANSWER
            time.sleep(0.6 * Hurried.seconds)


def test_requests_must_come_in_time_and_answers_need_not():
    """The clients are at work side by side, since each needs a second."""
    clients: list[Callable[[str], None]] = [
        partial(let_go_with_part_of_a_head, start=b"", drip=b""),
        partial(let_go_with_part_of_a_head, start=b"", drip=b"\r\n"),
        partial(let_go_with_part_of_a_head, start=b"GET / HTTP/1.1\r\nX-Slow: ", drip=b"a"),
        let_go_with_a_body_that_goes_on_after_its_answer,
        answered_when_its_body_is_read_slowly,
        answered_although_the_answer_takes_long,
        answered_over_a_connection_that_is_used_again,
    ]
    with served(Hurried) as url, ThreadPoolExecutor(len(clients)) as threads:
        for client in [threads.submit(each, url) for each in clients]:
            client.result(HANG_SECONDS)
