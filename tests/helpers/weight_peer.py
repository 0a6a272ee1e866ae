"""The other end of a transport, as a process of its own that may die on the way.

What it says goes to stdout and what it is told comes from stdin, a JSON object a line::

    python -m tests.helpers.weight_peer share FOLDER          a handle for each line it is told
    python -m tests.helpers.weight_peer send FOLDER PORT SIZE
    python -m tests.helpers.weight_peer receive PORT RANK SIZE
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch

from rollout.errors import RolloutError
from rollout.weights.disk import CheckpointSource
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import WeightGroup
from rollout.weights.groups import WeightGroups
from rollout.weights.manifest import Manifest
from rollout.weights.shared_memory import SharedMemorySender

BUCKET_BYTES = 8192
SECONDS = 60.0
DIES_AFTER = int(os.environ.get("DIES_AFTER", "-1"))  # tensors


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def mortal(named_tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream, cut by a SIGKILL where it is asked for."""
    for index, pair in enumerate(named_tensors):
        if index == DIES_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair


class MortalSource:
    def __init__(self, folder: str) -> None:
        self._source = CheckpointSource(folder)

    def manifest(self) -> Manifest:
        return self._source.manifest()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return mortal(self._source)


def share(folder: str) -> None:
    with SharedMemorySender(BUCKET_BYTES) as sender:
        handles = sender.handles(MortalSource(folder))
        for _ in sys.stdin:
            handle = next(handles, None)
            if handle is None:
                return
            say(handle=handle)


def send(folder: str, port: int, size: int) -> None:
    group = WeightGroup(
        master_address="127.0.0.1", master_port=port, rank=0, world_size=size,
        group_name="weights", timeout=SECONDS,
    )  # fmt: skip
    sender, source = DistributedSender(group, BUCKET_BYTES), MortalSource(folder)
    say(arguments=sender.arguments(source))
    sender.send(source)


def receive(port: int, rank: int, size: int) -> None:
    groups = WeightGroups()
    groups.init("127.0.0.1", port, rank, size, "weights", "gloo", SECONDS)
    say(joined=rank)
    call = json.loads(sys.stdin.readline())
    with groups.source(**call, timeout=SECONDS) as source:
        say(received=sum(1 for _ in mortal(source)))


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    say(up=True)  # what follows has its time limits, imports have none
    numbers = [int(each) if each.isdigit() else each for each in arguments]
    try:
        {"share": share, "send": send, "receive": receive}[what](*numbers)
    except RolloutError as error:
        say(error=str(error))
