"""Engines of one and of two ranks that take the same updates: `bench_weights` prints what each rank
reads, and the time of two ranks beside that of one."""

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
from harness.shapes import SHAPES, Shape, write_config
from harness.timing import Call, in_turns, paired
from safetensors.torch import save_file

from rollout import RolloutEngine
from rollout.config import DType, LoadFormat
from rollout.engine.following_rank import FollowingRank
from rollout.models.loader import load_model
from rollout.weights.checkpoint_source import CheckpointSource
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import WeightGroup, listen
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.shared_memory import SharedMemorySender
from rollout.weights.source import WeightTensors

MIB = 2**20
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


def write_model(folder: Path, shape: Shape) -> Path:
    """A checkpoint of random weights."""
    write_config(folder, shape)
    model = load_model(
        folder, DType.bfloat16, torch.device("cpu"), load_format=LoadFormat.dummy, packing=False
    )
    loaders = model.weight_loaders().items()
    tensors = {
        name: torch.randn(loader.shape, dtype=torch.bfloat16) / loader.shape[-1] ** 0.5
        for name, loader in loaders
        if loader.required
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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
        self._receiver = (
            self.engine.receiver
            if isinstance(self.engine, FollowingRank)
            else self.engine.weights.receiver
        )
        self._commands = commands
        self._folder = folder
        self._arguments = arguments
        self._pairs = list(HeldWeights(folder))
        self.engine.init_weights_update_group(
            "127.0.0.1", group_port, 1, 1 + size, "bench", timeout=SECONDS
        )

    def share(self) -> int:
        """The bytes of what this rank stores, once, in the dtype that comes."""
        loaders = self._receiver.weights.parts["target"].weight_loaders().values()
        own = [it.shard.loader if it.shard else it for it in loaders if it.required]
        return sum(TensorSpec(it.shape, torch.bfloat16).num_bytes for it in own)

    def run(self, way: str) -> int:
        """Take an update; the bytes that this rank read of it."""
        engine, groups = self.engine, self._receiver.groups
        before = groups.num_bytes("bench")
        if way == "in process":
            engine.update_weights_from_tensor(self._pairs)
        elif way == "disk":
            engine.update_weights_from_disk(self._folder)
        elif way == "shared memory":
            engine.update_weights_from_ipc(self._handles())
        elif way == "from rank 0":
            self._from_rank_0()
        else:
            engine.update_weights_from_distributed(**self._arguments)
        return groups.num_bytes("bench") - before or self._receiver.weights.num_bytes

    def _handles(self) -> Iterator[dict[str, Any]]:
        """Says of each when it has been read."""
        while (handle := self._commands.recv()) is not None:
            yield handle
            self._commands.send("read")

    def _from_rank_0(self) -> None:
        """As a server's rank 0 brings it to all; alone it reads its own."""
        if isinstance(self.engine, FollowingRank):
            self.engine.follow()
            return
        with self.engine.leading():
            self.engine.update_weights_from_tensor(self._pairs)


def serve(commands: Connection, *arguments: Any) -> None:
    """A rank's process: says its share, then what it read of each update it is told to take."""
    rank = RankUpdates(commands, *arguments)
    commands.send(rank.share())
    while way := commands.recv():
        commands.send(rank.run(way))


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
        self.shares = [each.recv() for each in self._connections]

    def update(self, way: str) -> list[int]:
        """The bytes that each rank read."""
        for each in self._connections:
            each.send(way)
        if way == "shared memory":
            self._share()
        elif way == "gloo":
            self._sender.send(self._weights)
        return [each.recv() for each in self._connections]

    def _share(self) -> None:
        """Hand out handles, each once its segment is filled. No rank reads that any more."""
        handed_out = 0
        for handle in self._shared.handles(self._weights):
            for each in self._connections:
                each.send(handle)
            handed_out += 1
            if handed_out == SEGMENTS:
                self._await_reading()
                handed_out -= 1
        for each in self._connections:
            each.send(None)
        for _ in range(handed_out):
            self._await_reading()

    def _await_reading(self) -> None:
        for each in self._connections:
            each.recv()

    def close(self) -> None:
        self._shared.close()
        for process in self._processes:
            process.kill()
            process.join()


WAYS = ("in process", "disk", "shared memory", "from rank 0", "gloo")


@contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        shape = replace(SHAPE, num_layers=2, vocab_size=997) if options.quick else SHAPE
        yield write_model(Path(folder), shape)


def rank_rows(options: argparse.Namespace) -> Iterator[Row]:
    with ExitStack() as stack:
        folder = stack.enter_context(model_folder(options))
        weights = HeldWeights(folder)
        engines = {}
        for size in (1, 2):
            engines[size] = Ranks(size, options.threads, folder, weights)
            stack.callback(engines[size].close)
        for way in WAYS:
            for rank, num_bytes in enumerate(engines[2].update(way)):
                share = engines[2].shares[rank]
                label = f"{way}, rank {rank} of 2: bytes read"
                yield row(label, num_bytes / MIB, "MiB")
                yield row(f"{label} / its share", num_bytes / share, "ratio", 1.01, at_most=True)
            calls: dict[int, Call] = {
                size: partial(ranks.update, way) for size, ranks in engines.items()
            }
            seconds = in_turns(calls, options.rounds)
            for size, each in seconds.items():
                label = f"{way}, ranks {size}"
                yield row(label, weights.num_bytes / median(each) / 1e9, "GB/s")
            ratio = paired(seconds[2], seconds[1])
            yield row(f"{way}, ranks 2: time / ranks 1", ratio, "ratio", BAR, at_most=True)
