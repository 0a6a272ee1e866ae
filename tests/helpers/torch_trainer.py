"""The sending end of a weight group as other engines' trainers have it: torch, and no notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from tests.helpers.hang import HANG_SECONDS


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
