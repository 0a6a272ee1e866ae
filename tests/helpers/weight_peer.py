"""The other end of a transport, as a process of its own that may die or stop on the way.

Messages to it and from it go through a pipe.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.forked import forked
from tests.helpers.weight_transports import BUCKET_BYTES, Announced, arguments, sending_end

CLOSED = r"onnection (closed|reset|refused)|roken pipe|cannot be reached"
"""The words for a member whose connections have ended, unlike one that is late."""


class Peer:
    """A process that runs one of this file's functions: `share`, `send`.

    After ``after`` tensors of its stream, it sends itself the signal ``by``.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        after: int = -1,
        by: signal.Signals = signal.SIGKILL,
    ) -> None:
        self._pipe, theirs = Pipe()
        self.process = forked(function, theirs, (after, by), *arguments)
        theirs.close()  # so that its death ends the pipe

    def hear(self, key: str) -> Any:
        """Raises EOFError where it has died."""
        try:
            return self._pipe.recv()[key]
        except (EOFError, ConnectionResetError):
            raise EOFError("the peer has died") from None

    def handles(self) -> Iterator[dict[str, Any]]:
        """The handles of a peer that shares, until there are no more; EOFError when it dies."""
        while True:
            try:
                self._pipe.send(None)
            except BrokenPipeError:
                raise EOFError("the peer has died") from None
            handle = self.hear("handle")
            if handle is None:
                return
            yield handle


@contextmanager
def peer(function: Callable[..., None], *arguments: Any, **cut: Any) -> Iterator[Peer]:
    found = Peer(function, *arguments, **cut)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.join()


class _CutSource(Announced):
    """The tensors of a folder, up to the signal."""

    def __init__(self, folder: Path, cut: tuple[int, signal.Signals]) -> None:
        super().__init__(load_file(folder / "model.safetensors"))
        self._after, self._by = cut

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(super().__iter__()):
            if index == self._after:
                os.kill(os.getpid(), self._by)
            yield pair


def share(pipe: Connection, cut: tuple[int, signal.Signals], folder: Path) -> None:
    """Hands out a handle each time it is asked, None when there are no more, until it is killed."""
    with SharedMemorySender(BUCKET_BYTES) as sender:
        handles = sender.handles(_CutSource(folder, cut))
        while True:
            pipe.recv()
            pipe.send({"handle": next(handles, None)})


def send(pipe: Connection, cut: tuple[int, signal.Signals], folder: Path, port: int) -> None:
    """Sends the folder's tensors through a group of two."""
    group, source = sending_end(port), _CutSource(folder, cut)
    pipe.send({"arguments": arguments(source.tensors)})
    for _, tensor in source:
        group.broadcast(tensor)
