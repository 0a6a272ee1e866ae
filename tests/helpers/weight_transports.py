"""Every way weights can come to an engine, behind one call, for tests that try them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollout import RolloutEngine
from rollout.weights.bucket import buckets
from rollout.weights.group import WeightGroup
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.shared_memory import SharedMemorySender
from rollout.weights.source import WeightTensors
from rollout.weights.update_counts import UpdateCounts
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port

Tensors = Mapping[str, torch.Tensor]
Update = Callable[..., UpdateCounts]  # (tensors, **options): one whole update

BUCKET_BYTES = 8192  # several buckets, and tensors larger than one
TRANSPORTS = (
    "collection",
    "generator",
    "flattened_bucket",
    "disk",
    "shared_memory",
    "shared_memory_calls",
    "distributed",
)


class Announced(WeightTensors):
    """Tensors that come one by one, whose manifest is known."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def manifest(self) -> Manifest:
        return {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


def sending_end(port: int, world_size: int = 2) -> WeightGroup:
    """Rank 0 of the group ``weights``."""
    return WeightGroup(
        master_address="127.0.0.1",
        master_port=port,
        rank=0,
        world_size=world_size,
        group_name="weights",
        timeout=HANG_SECONDS,
    )


@contextmanager
def group_of(
    engine: RolloutEngine,
    world_size: int = 2,
    *,
    engine_timeout: float = HANG_SECONDS,
) -> Iterator[tuple[WeightGroup, ThreadPoolExecutor]]:
    """The engine at rank 1 and this process's sender at rank 0, with a thread to send from."""
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(sending_end, port, world_size)
        engine.init_weights_update_group(
            "127.0.0.1", port, 1, world_size, "weights", timeout=engine_timeout
        )
        group = joined.result(HANG_SECONDS)
        try:
            yield group, threads
        finally:
            group.close()
            engine.destroy_weights_update_group("weights")


def arguments(tensors: Tensors) -> dict[str, Any]:
    """The arguments of a call by which a sender announces its own broadcasts."""
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": "weights",
    }


def send_to(
    engine: Any,
    group: WeightGroup,
    threads: ThreadPoolExecutor,
    tensors: Tensors,
    **options: Any,
) -> UpdateCounts:
    """A whole update of an engine or a cluster through the sender's group."""
    sent = threads.submit(lambda: [group.broadcast(each) for each in tensors.values()])
    try:
        return engine.update_weights_from_distributed(**arguments(tensors), **options)
    finally:
        sent.result(HANG_SECONDS)


@contextmanager
def opened(kind: str, engine: Any, folder: Path, world_size: int = 2) -> Iterator[Update]:
    """The transport to an engine or a cluster, ready for any number of updates."""

    def update(tensors: Tensors, **options: Any) -> UpdateCounts:
        pairs = tensors.items()
        match kind:
            case "collection":
                return engine.update_weights_from_tensor(pairs, **options)
            case "generator":
                return engine.update_weights_from_tensor(iter(pairs), **options)
            case "flattened_bucket":
                stream = buckets(pairs, BUCKET_BYTES)
                return engine.update_weights_from_tensor(stream, load_format=kind, **options)
            case "disk":
                folder.mkdir(exist_ok=True)
                save_file(dict(tensors), folder / "model.safetensors")
                return engine.update_weights_from_disk(folder, **options)
            case "shared_memory":
                return engine.update_weights_from_ipc(shared.handles(pairs), **options)
            case "shared_memory_calls":
                engine.begin_weight_update(Announced(tensors).manifest(), **options)
                for handle in shared.handles(pairs):
                    engine.update_weights_from_ipc(handle)
                return engine.end_weight_update()
            case _:
                return send_to(engine, group, threads, tensors, **options)

    with ExitStack() as stack:
        if kind.startswith("shared_memory"):
            shared = stack.enter_context(SharedMemorySender(BUCKET_BYTES, num_segments=2))
        elif kind == "distributed":
            group, threads = stack.enter_context(group_of(engine, world_size))
        yield update
