"""The sending end of a weight group as other engines' trainers have it: torch, and no notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port


class TorchTrainer:
    """Rank 0 of a group of its own, beside whatever default group torch has in this process."""

    def __init__(self, port: int, world_size: int = 2, group_name: str = "weights") -> None:
        """Wait until every member has come."""
        timeout = timedelta(seconds=HANG_SECONDS)
        met = dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout)
        store, rank, size = next(met)
        store.set_timeout(timeout)
        self.group, _ = _new_process_group_helper(
            size, rank, [], dist.Backend("gloo"), dist.PrefixStore(group_name, store),
            group_name=group_name, timeout=timeout,
        )  # fmt: skip
        _world.pg_group_ranks[self.group] = {index: index for index in range(size)}

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self.group)

    def send_during(
        self, announce: Callable[[], object], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Broadcast the tensors while ``announce`` runs, which returns when they have arrived."""
        with ThreadPoolExecutor(1) as threads:
            announced = threads.submit(announce)
            self.send(tensors.values())
            announced.result(HANG_SECONDS)

    def close(self) -> None:
        dist.destroy_process_group(self.group)


@contextmanager
def joined_trainer(
    join: Callable[[dict[str, Any]], object], group_name: str = "weights", world_size: int = 2
) -> Iterator[TorchTrainer]:
    """The trainer's end of a group. ``join``, given the address, makes the others join it."""
    address = {
        "master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1,
        "world_size": world_size, "backend": "gloo",
    }  # fmt: skip
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, address)
        trainer = TorchTrainer(address["master_port"], world_size, group_name)
        joining.result(HANG_SECONDS)
    try:
        yield trainer
    finally:
        trainer.close()
