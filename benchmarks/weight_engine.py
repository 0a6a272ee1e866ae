"""An engine in processes of its own, one for each rank, and the trainer's end of its updates."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rollout import RolloutEngine, SamplingParams
from rollout.parallel import host_store
from rollout.weights.bucket import CACHED_BUCKET_BYTES, buckets
from rollout.weights.checkpoint_source import CheckpointSource
from rollout.weights.group import WeightGroup
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.shared_memory import SharedMemorySender
from rollout.weights.source import WeightTensors

COPY, IN_PROCESS, DISK = "copy_", "in process", "disk"
FLATTENED, SHARED, GLOO = "flattened bucket", "shared memory", "gloo"

_SECONDS = 300.0  # that a rank waits for the others


class HeldWeights(WeightTensors):
    """A checkpoint's tensors, in this process's own memory: a trainer's."""

    def __init__(self, folder: Path) -> None:
        self._tensors = {name: tensor.clone() for name, tensor in CheckpointSource(folder)}

    def manifest(self) -> Manifest:
        return {name: TensorSpec.of(tensor) for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.manifest().values())


class _Rank:
    """One rank's engine, and the ways it takes an update."""

    def __init__(
        self, asked: Connection, environment: Mapping[str, str], threads: int, folder: Path,
        port: int,
    ) -> None:  # fmt: skip
        os.environ.update(environment)
        torch.set_num_threads(threads)
        size = int(environment["WORLD_SIZE"])
        parallel = {"mode": "tensor", "size": size, "timeout": _SECONDS} if size > 1 else {}
        self._engine = RolloutEngine.from_pretrained(
            folder, spec="none", dtype="bfloat16", parallel=parallel
        )
        if size == 1:  # one that has run before
            self._engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
        self._asked = asked
        self._folder = folder
        self._weights = HeldWeights(folder)
        self._copies = {name: torch.empty_like(tensor) for name, tensor in self._weights}
        self._engine.init_weights_update_group(
            "127.0.0.1", port, 1, 1 + size, "bench", timeout=_SECONDS
        )

    def take(self, way: str, bucket_bytes: int, arguments: dict[str, Any]) -> None:
        engine = self._engine
        if way == COPY:
            for name, tensor in self._weights:
                self._copies[name].copy_(tensor)
        elif way == IN_PROCESS:
            engine.update_weights_from_tensor(list(self._weights))
        elif way == DISK:
            engine.update_weights_from_disk(self._folder)
        elif way == FLATTENED:
            stream = buckets(self._weights, bucket_bytes)
            engine.update_weights_from_tensor(stream, load_format="flattened_bucket")
        elif way == SHARED:
            engine.update_weights_from_ipc(self._handles())
        else:
            engine.update_weights_from_distributed(**arguments)

    def _handles(self) -> Iterator[dict[str, Any]]:
        """Says of each when it has been read."""
        while (handle := self._asked.recv()) is not None:
            yield handle
            self._asked.send("read")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _serve(asked: Connection, *arguments: Any) -> None:
    """A rank's process: answers when it is ready, and after each update that it is told to take."""
    rank = _Rank(asked, *arguments)
    asked.send("ready")
    while update := asked.recv():
        rank.take(*update)
        asked.send("done")


class WeightEngine:
    """The processes of one engine, and the sender that they take updates from.

    A context manager, which kills them. ``num_segments``: of shared memory; one is filled while
    others are read, or wait for it.
    """

    def __init__(
        self, size: int, threads: int, folder: Path, weights: HeldWeights, *, num_segments: int
    ) -> None:
        self._weights = weights
        self._num_segments = num_segments
        self._shared: dict[int, SharedMemorySender] = {}  # by bucket_bytes
        spawn = multiprocessing.get_context("spawn")
        self._meeting = host_store()  # of the ranks
        port = _free_port()
        self._connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._meeting.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            arguments = (theirs, environment, threads, folder, port)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)
        self._group = WeightGroup(
            master_address="127.0.0.1", master_port=port, rank=0, world_size=1 + size,
            group_name="bench", timeout=_SECONDS,
        )  # fmt: skip
        self._await_all()

    def update(self, way: str, bucket_bytes: int = CACHED_BUCKET_BYTES) -> None:
        manifest = self._weights.manifest()
        arguments = {
            "names": list(manifest),
            "dtypes": [spec.dtype for spec in manifest.values()],
            "shapes": [spec.shape for spec in manifest.values()],
            "group_name": "bench",
            "load_format": f"packed:{bucket_bytes}",
        }
        self._tell((way, bucket_bytes, arguments))
        if way == SHARED:
            self._share(bucket_bytes)
        elif way == GLOO:
            self._send_packed(bucket_bytes)
        self._await_all()

    def _send_packed(self, num_bytes: int) -> None:
        parts: list[torch.Tensor] = []
        for _, tensor in self._weights:
            parts.append(tensor.reshape(-1).view(torch.uint8))
            if sum(part.numel() for part in parts) > num_bytes:
                self._group.broadcast(torch.cat(parts))
                parts = []
        if parts:
            self._group.broadcast(torch.cat(parts))

    def _share(self, bucket_bytes: int) -> None:
        """Hand out handles, each once its segment is filled. No rank reads that any more."""
        if bucket_bytes not in self._shared:
            self._shared[bucket_bytes] = SharedMemorySender(
                bucket_bytes, num_segments=self._num_segments
            )
        handed_out = 0
        for handle in self._shared[bucket_bytes].handles(self._weights):
            self._tell(handle)
            handed_out += 1
            if handed_out == self._num_segments:
                self._await_all()
                handed_out -= 1
        self._tell(None)
        for _ in range(handed_out):
            self._await_all()

    def _tell(self, message: object) -> None:
        for each in self._connections:
            each.send(message)

    def _await_all(self) -> None:
        for each in self._connections:
            each.recv()

    def __enter__(self) -> WeightEngine:
        return self

    def __exit__(self, *error: object) -> None:
        for sender in self._shared.values():
            sender.close()
        for process in self.processes:
            process.kill()
            process.join()
