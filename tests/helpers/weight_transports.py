"""Every way weights can come to an engine, behind one call, for tests that try them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore

from rollout import RolloutEngine
from rollout.weights.bucket import buckets
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import WeightGroup, listen
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.hang import HANG_SECONDS

Tensors = Mapping[str, torch.Tensor]
Update = Callable[..., None]  # (tensors, **options): one whole update

BUCKET_BYTES = 8192  # several buckets, and tensors larger than one
TRANSPORTS = (
    "collection",
    "generator",
    "flattened_bucket",
    "disk",
    "shared_memory",
    "shared_memory_calls",
    "distributed",
    "distributed_bare",
)


class TensorSource:
    """Tensors as a WeightSource."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def manifest(self) -> Manifest:
        return {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


@contextmanager
def opened(kind: str, engine: RolloutEngine, folder: Path) -> Iterator[Update]:
    """The transport, ready for any number of updates."""
    if kind.startswith("shared_memory"):
        with SharedMemorySender(BUCKET_BYTES, num_segments=2) as sender:
            yield lambda tensors, **options: _shared(kind, engine, sender, tensors, options)
    elif kind.startswith("distributed"):
        with group_of(engine) as (group, threads):
            yield lambda tensors, **options: _distributed(
                kind, engine, group, threads, tensors, options
            )
    else:
        yield lambda tensors, **options: _here(kind, engine, folder, tensors, options)


def member(store: TCPStore, rank: int = 0, world_size: int = 2) -> WeightGroup:
    """A member of the group ``weights``, whose rank 0 has this store."""
    return WeightGroup(
        master_address="127.0.0.1",
        master_port=store.port,
        rank=rank,
        world_size=world_size,
        group_name="weights",
        timeout=HANG_SECONDS,
        store=store if rank == 0 else None,
    )


@contextmanager
def group_of(
    engine: RolloutEngine,
    world_size: int = 2,
    store: TCPStore | None = None,
    *,
    engine_timeout: float = HANG_SECONDS,
) -> Iterator[tuple[WeightGroup, ThreadPoolExecutor]]:
    """The engine at rank 1 and this process's sender at rank 0, with a thread to send from."""
    store = store or listen("127.0.0.1", HANG_SECONDS)
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(member, store, world_size=world_size)
        engine.init_weights_update_group(
            "127.0.0.1", store.port, 1, world_size, "weights", timeout=engine_timeout
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


def _here(
    kind: str, engine: RolloutEngine, folder: Path, tensors: Tensors, options: dict[str, Any]
) -> None:
    pairs = list(tensors.items())
    if kind == "collection":
        engine.update_weights_from_tensor(pairs, **options)
    elif kind == "generator":
        engine.update_weights_from_tensor((pair for pair in pairs), **options)
    elif kind == "flattened_bucket":
        stream = buckets(pairs, BUCKET_BYTES)
        engine.update_weights_from_tensor(stream, load_format="flattened_bucket", **options)
    else:
        folder.mkdir(exist_ok=True)
        save_file(dict(tensors), folder / "model.safetensors")
        engine.update_weights_from_disk(folder, **options)


def _shared(
    kind: str,
    engine: RolloutEngine,
    sender: SharedMemorySender,
    tensors: Tensors,
    options: dict[str, Any],
) -> None:
    handles = sender.handles(tensors.items())
    if kind == "shared_memory":
        engine.update_weights_from_ipc(handles, **options)
        return
    engine.begin_weight_update(TensorSource(tensors).manifest(), **options)
    for handle in handles:
        engine.update_weights_from_ipc(handle)
    engine.end_weight_update()


def _distributed(
    kind: str,
    engine: RolloutEngine,
    group: WeightGroup,
    threads: ThreadPoolExecutor,
    tensors: Tensors,
    options: dict[str, Any],
) -> None:
    sent: Future[None]
    if kind == "distributed":
        sender = DistributedSender(group, BUCKET_BYTES)
        call = sender.arguments(TensorSource(tensors))
        sent = threads.submit(sender.send, TensorSource(tensors), HANG_SECONDS)
    else:
        call = arguments(tensors)
        sent = threads.submit(lambda: [group.broadcast(each) for each in tensors.values()])
    try:
        engine.update_weights_from_distributed(**call, **options)
    finally:
        error = sent.exception(HANG_SECONDS)
    if error is not None:
        raise error
