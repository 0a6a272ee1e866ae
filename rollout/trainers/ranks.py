"""The processes that share a sharded model, and their agreement to go on or to stop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from rollout.errors import WeightUpdateError


class TrainerRanks:
    """The ranks that take part in every collective of a source; none where nothing is sharded.

    ``groups`` holds this rank's group along each dimension of a mesh: what is agreed along one
    after the other is agreed by all.
    """

    def __init__(self, groups: Sequence[ProcessGroup] = ()) -> None:
        self.groups = tuple(groups)

    @property
    def device(self) -> torch.device:
        backends = distributed.get_backend_config(self.groups[0])
        if "cpu" in backends:
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, f"no device for {backends}"
        return accelerator

    def all_reduce_max(self, *values: int) -> list[int]:
        """The largest of each value over all ranks. A collective."""
        if not self.groups:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.int64, device=self.device)
        for group in self.groups:
            distributed.all_reduce(agreed, distributed.ReduceOp.MAX, group=group)
        return agreed.tolist()

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in the order of ranks of the only group. A collective."""
        (group,) = self.groups
        data = text.encode()
        (width,) = self.all_reduce_max(len(data))
        own = torch.frombuffer(bytearray(data.ljust(width)), dtype=torch.uint8)
        rows = [torch.empty_like(own, device=self.device) for _ in range(group.size())]
        distributed.all_gather(rows, own.to(self.device), group=group)
        return [bytes(row.tolist()).decode().rstrip() for row in rows]

    def go_on(self) -> None:
        """Go on together. Raises WeightUpdateError where another rank called `stop` instead."""
        (failed,) = self.all_reduce_max(0)
        if failed:
            raise WeightUpdateError(
                f"the weight update failed on rank {failed - 1}, whose error says why; "
                "it was given up on every rank"
            )

    def stop(self) -> None:
        """Tell the others, who are at `go_on` or will be, that this rank has failed."""
        if self.groups:
            self.all_reduce_max(distributed.get_rank() + 1)
