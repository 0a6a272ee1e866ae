"""HTTP by hand: requests that are never finished, readers that never read."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.helpers.hang import HANG_SECONDS


@contextmanager
def open_request(
    url: str,
    method: str,
    path: str,
    headers: Mapping[str, str],
    *,
    receive_bytes: int | None = None,
) -> Iterator[socket.socket]:
    """A connection on which the head of a request was sent; closed with the context.

    ``receive_bytes``: of answers that the system takes before somebody reads them.
    """
    server = urlsplit(url)
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(HANG_SECONDS)
    connection.connect((server.hostname, server.port))
    lines = [f"{method} {path} HTTP/1.1", f"Host: {server.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        yield connection


def read_status(connection: socket.socket) -> int:
    head = b""
    while b"\r\n" not in head:
        received = connection.recv(4096)
        assert received, "closed without an answer"
        head += received
    return int(head.split()[1])
