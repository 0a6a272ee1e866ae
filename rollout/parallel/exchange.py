"""Collectives of a process group of torch.distributed, such as gloo's or NCCL's.

Legend: N ranks, T rows of one rank, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor's bits as integers, which sum without rounding."""
    words = x.numel() * x.element_size() % 4 == 0
    return x.view(-1).view(torch.int32 if words else torch.uint8)


class GroupExchange:
    """Each call raises ConnectionError if a rank does not come in time."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_gather_columns(self, x_TC: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        """See `RankGroup.all_gather_columns`."""
        rows, width = len(x_TC), max(map(len, parts))
        if x_TC.shape[1] < width:
            x_TC = pad(x_TC, (0, width - x_TC.shape[1]))
        x_TC = x_TC.contiguous()
        gathered_NTC = x_TC.new_empty(len(parts), rows, width)
        if x_TC.numel():
            flat = gathered_NTC.view(-1)
            self._run(lambda: self._group._allgather_base(flat, x_TC.view(-1)))
        if all(len(part) == width for part in parts):  # one copy; of a single row none
            return gathered_NTC.transpose(0, 1).reshape(rows, len(parts) * width)
        pairs = zip(gathered_NTC, parts, strict=True)
        return torch.cat([each_TC[:, : len(part)] for each_TC, part in pairs], 1)

    def sum_disjoint(self, x: torch.Tensor) -> None:
        """See `RankGroup.sum_disjoint`."""
        self.all_reduce(bits_of(x))

    def all_reduce(self, x: torch.Tensor) -> None:
        """See `RankGroup.all_reduce`."""
        if x.numel():
            self._run(lambda: self._group.allreduce(x))

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite ``x``, which is contiguous, with rank 0's. Every rank's has the same shape and
        dtype."""
        if x.numel():
            self._run(lambda: self._group.broadcast(x, 0))

    def abort(self) -> None:
        """End the calls under way, on the device too; what they were to bring is undefined."""
        self._group.abort()

    def close(self) -> None:
        """Leave. Calls of other ranks that wait for this one fail."""
        self._group = None

    def _run(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
