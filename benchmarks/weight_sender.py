"""The sending process of bench_weights: a trainer that holds a checkpoint in memory.

A line on stdin asks for something; every answer is a JSON line on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rollout.weights.disk import CheckpointSource
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import WeightGroup
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.shared_memory import SharedMemorySender


class HeldWeights:
    """A checkpoint's tensors, in this process's own memory."""

    def __init__(self, folder: Path) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in CheckpointSource(folder)}

    def manifest(self) -> Manifest:
        return {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.manifest().values())


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def share(weights: HeldWeights, bucket_bytes: int) -> None:
    """An update for each line that says so, a handle for each line after it."""
    with SharedMemorySender(bucket_bytes, num_segments=2) as sender:
        for _ in sys.stdin:
            for handle in sender.handles(weights):
                say(handle=handle)
                sys.stdin.readline()
            say(handle=None)


def send(weights: HeldWeights, bucket_bytes: int, port: int) -> None:
    """An update through a group for each line."""
    group = WeightGroup(
        master_address="127.0.0.1", master_port=port, rank=0, world_size=2, group_name="bench",
    )  # fmt: skip
    sender = DistributedSender(group, bucket_bytes)
    say(arguments=sender.arguments(weights))
    for _ in sys.stdin:
        sender.send(weights)


def main() -> None:
    what, folder, threads, bucket_bytes, port = sys.argv[1:]
    torch.set_num_threads(int(threads))
    weights = HeldWeights(Path(folder))
    say(num_bytes=weights.num_bytes)
    if what == "share":
        share(weights, int(bucket_bytes))
    else:
        send(weights, int(bucket_bytes), int(port))


if __name__ == "__main__":
    main()
