"""Engines of one and of two ranks that take the same updates: the time of two ranks beside that
of one."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.rows import Row, row
from harness.shapes import SHAPES, write_checkpoint
from harness.timing import Call, in_turns, paired

from rollout import RolloutEngine
from rollout.weights.checkpoint_source import CheckpointSource
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import WeightGroup, listen
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.shared_memory import SharedMemorySender
from rollout.weights.source import WeightTensors

SECONDS = 300.0  # that a rank waits for the others
BAR = 1.15  # of an update to one rank
SEGMENTS = 4  # of shared memory: one is filled while others are read, or wait for it
SHAPE = replace(SHAPES["demo"], num_heads=8, num_kv_heads=2, vocab_size=49_151)
"""The demo model's sizes, as far as two ranks can split it; neither half of its tables is even."""


class HeldWeights(WeightTensors):
    """A checkpoint's tensors, in this process's own memory: a trainer's."""

    def __init__(self, folder: Path) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in CheckpointSource(folder)}

    def manifest(self) -> Manifest:
        return {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.manifest().values())


class RankUpdates:
    """One rank's engine, and the ways it takes an update."""

    def __init__(
        self, commands: Connection, environment: Mapping[str, str], threads: int, folder: Path,
        group_port: int, arguments: dict[str, Any],
    ) -> None:  # fmt: skip
        os.environ.update(environment)
        torch.set_num_threads(threads)
        size = int(environment["WORLD_SIZE"])
        parallel = {"mode": "tensor", "size": size, "timeout": SECONDS} if size > 1 else {}
        self.engine = RolloutEngine.from_pretrained(
            folder, spec="none", dtype="bfloat16", parallel=parallel
        )
        self._commands = commands
        self._folder = folder
        self._arguments = arguments
        self._pairs = list(HeldWeights(folder))
        self.engine.init_weights_update_group(
            "127.0.0.1", group_port, 1, 1 + size, "bench", timeout=SECONDS
        )

    def run(self, way: str) -> None:
        """Take an update."""
        if way == "in process":
            self.engine.update_weights_from_tensor(self._pairs)
        elif way == "disk":
            self.engine.update_weights_from_disk(self._folder)
        elif way == "shared memory":
            self.engine.update_weights_from_ipc(self._handles())
        else:
            self.engine.update_weights_from_distributed(**self._arguments)

    def _handles(self) -> Iterator[dict[str, Any]]:
        """Says of each when it has been read."""
        while (handle := self._commands.recv()) is not None:
            yield handle
            self._commands.send("read")


def serve(commands: Connection, *arguments: Any) -> None:
    """A rank's process: answers when it is ready, and after each update that it is told to take."""
    rank = RankUpdates(commands, *arguments)
    commands.send("ready")
    while way := commands.recv():
        rank.run(way)
        commands.send("done")


class Ranks:
    """The processes of one engine, and the sender that they take updates from."""

    def __init__(self, size: int, threads: int, folder: Path, weights: HeldWeights) -> None:
        self._weights = weights
        spawn = multiprocessing.get_context("spawn")
        meeting, store = listen("127.0.0.1", SECONDS), listen("127.0.0.1", SECONDS)
        self._meeting = meeting  # which hosts the ranks' store
        announced = {
            "names": list(weights.tensors),
            "dtypes": [str(each.dtype) for each in weights.tensors.values()],
            "shapes": [list(each.shape) for each in weights.tensors.values()],
            "group_name": "bench",
            "load_format": "flattened_bucket",
        }
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            process = spawn.Process(
                target=serve,
                args=(theirs, environment, threads, folder, store.port, announced),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        group = WeightGroup(
            master_address="127.0.0.1", master_port=store.port, rank=0, world_size=1 + size,
            group_name="bench", timeout=SECONDS, store=store,
        )  # fmt: skip
        self._sender = DistributedSender(group)
        self._shared = SharedMemorySender(num_segments=SEGMENTS)
        self._await_all()

    def update(self, way: str) -> None:
        for each in self._connections:
            each.send(way)
        if way == "shared memory":
            self._share()
        elif way == "gloo":
            self._sender.send(self._weights)
        self._await_all()

    def _share(self) -> None:
        """Hand out handles, each once its segment is filled. No rank reads that any more."""
        handed_out = 0
        for handle in self._shared.handles(self._weights):
            for each in self._connections:
                each.send(handle)
            handed_out += 1
            if handed_out == SEGMENTS:
                self._await_all()
                handed_out -= 1
        for each in self._connections:
            each.send(None)
        for _ in range(handed_out):
            self._await_all()

    def _await_all(self) -> None:
        for each in self._connections:
            each.recv()

    def close(self) -> None:
        self._shared.close()
        for process in self._processes:
            process.kill()
            process.join()


WAYS = ("in process", "disk", "shared memory", "gloo")


@contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        shape = replace(SHAPE, num_layers=2, vocab_size=997) if options.quick else SHAPE
        yield write_checkpoint(Path(folder), shape)


def rank_rows(options: argparse.Namespace) -> Iterator[Row]:
    with ExitStack() as stack:
        folder = stack.enter_context(model_folder(options))
        weights = HeldWeights(folder)
        engines = {}
        for size in (1, 2):
            engines[size] = Ranks(size, options.threads, folder, weights)
            stack.callback(engines[size].close)
        for way in WAYS:
            calls: dict[int, Call] = {
                size: partial(ranks.update, way) for size, ranks in engines.items()
            }
            seconds = in_turns(calls, options.rounds)
            for size, each in seconds.items():
                label = f"{way}, ranks {size}"
                yield row(label, weights.num_bytes / median(each) / 1e9, "GB/s")
            ratio = paired(seconds[2], seconds[1])
            yield row(f"{way}, ranks 2: time / ranks 1", ratio, "ratio", BAR, at_most=True)
