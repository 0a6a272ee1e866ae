"""The other end of a transport, as a process of its own that may die or stop on the way.

What it is told and what it says goes through a pipe.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollout.errors import RolloutError
from rollout.weights.checkpoint_source import CheckpointSource
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import WeightGroup
from rollout.weights.joined_groups import JoinedGroups
from rollout.weights.manifest import Manifest
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.forked import forked
from tests.helpers.hang import HANG_SECONDS

BUCKET_BYTES = 8192


class Peer:
    """A process that runs one of this file's functions: `share`, `send`, `receive`.

    ``after``: so many tensors of its stream, it sends itself ``by``.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        after: int = -1,
        by: signal.Signals = signal.SIGKILL,
    ) -> None:
        self._pipe, theirs = Pipe()
        cut = _Cut(after, by)
        self.process = forked(_serve, function, theirs, cut, arguments)
        theirs.close()  # so that its death ends the pipe

    def tell(self, what: Any = None) -> None:
        self._pipe.send(what)

    def hear(self, what: str) -> Any:
        """Raises EOFError where it has died."""
        try:
            return self._pipe.recv()[what]
        except (EOFError, ConnectionResetError):
            raise EOFError("the peer has died") from None

    def handles(self) -> Iterator[dict[str, Any]]:
        """The handles of a peer that shares, until there are no more; EOFError when it dies."""
        while True:
            try:
                self.tell()
            except BrokenPipeError:
                raise EOFError("the peer has died") from None
            handle = self.hear("handle")
            if handle is None:
                return
            yield handle

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


@contextmanager
def peer(function: Callable[..., None], *arguments: Any, **cut: Any) -> Iterator[Peer]:
    found = Peer(function, *arguments, **cut)
    try:
        yield found
    finally:
        found.kill()


class _Cut:
    def __init__(self, after: int, by: signal.Signals) -> None:
        self._after, self._by = after, by

    def __call__(self, named_tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(named_tensors):
            if index == self._after:
                os.kill(os.getpid(), self._by)
            yield pair


class _CutSource:
    def __init__(self, folder: str, cut: _Cut) -> None:
        self._source = CheckpointSource(folder)
        self._cut = cut

    def manifest(self) -> Manifest:
        return self._source.manifest()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._cut(self._source)


def _serve(
    function: Callable[..., None], pipe: Connection, cut: _Cut, arguments: tuple[Any, ...]
) -> None:
    try:
        function(pipe, cut, *arguments)
    except RolloutError as error:
        pipe.send({"error": str(error)})


def share(pipe: Connection, cut: _Cut, folder: str) -> None:
    """Hands out a handle each time it is asked, None when there are no more, until it is killed."""
    with SharedMemorySender(BUCKET_BYTES) as sender:
        handles = sender.handles(_CutSource(folder, cut))
        while True:
            pipe.recv()
            pipe.send({"handle": next(handles, None)})


def send(pipe: Connection, cut: _Cut, folder: str, port: int, size: int) -> None:
    group = WeightGroup(
        master_address="127.0.0.1", master_port=port, rank=0, world_size=size,
        group_name="weights", timeout=HANG_SECONDS,
    )  # fmt: skip
    sender, source = DistributedSender(group, BUCKET_BYTES), _CutSource(folder, cut)
    pipe.send({"arguments": sender.arguments(source)})
    sender.send(source)


def receive(pipe: Connection, cut: _Cut, port: int, rank: int, size: int) -> None:
    groups = JoinedGroups()
    groups.init("127.0.0.1", port, rank, size, "weights", "gloo", HANG_SECONDS)
    pipe.send({"joined": rank})
    with groups.source(**pipe.recv(), timeout=HANG_SECONDS) as source:
        pipe.send({"received": sum(1 for _ in cut(source))})
