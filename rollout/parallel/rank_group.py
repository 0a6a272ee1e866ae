"""The collectives of ranks that run one model.

Legend: T rows of one rank, C columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol

import torch

from rollout.errors import ParallelError

CLOSED = "the group is closed"
"""The reason of a rank that leaves because all is done."""


class RankGroup(Protocol):
    """Ranks that make the same calls in the same order.

    Every rank enters every call. A call raises ParallelError if a rank does not come in time; the
    group is unusable afterwards.
    """

    @property
    def rank(self) -> int:
        """This process's rank, in [0, size)."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, all of the same shape and dtype: [size, *x.shape]."""
        ...

    def all_gather_columns(self, x_TC: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        """Every rank's columns of the same rows, side by side: [T, all columns].

        ``parts``: the columns of each rank, consecutive.
        """
        ...

    def sum_disjoint(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite ``x``, which is contiguous, with the sum over all ranks, bit for bit: of each
        element at most one rank's is other than 0."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite ``x``, which is contiguous, with the sum over all ranks, the same bits on each.
        Its rounding depends on their number."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in the place of every rank's own, which has the same shape and dtype."""
        ...

    def all_gather_int(self, number: int) -> list[int]:
        """Every rank's 64-bit integer, by rank."""
        ...

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        ...

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes; the others' are ignored."""
        ...

    def post(self, topic: str, text: str) -> None:
        """Post a note for `collect`. Does not wait."""
        ...

    def collect(self, topic: str) -> list[str]:
        """Every rank's note on a topic, by rank. Waits until all have posted."""
        ...

    def count_call(self) -> None:
        """Count what this rank has done that the others do too, as its collectives are counted: a
        rank that has done less is waited for."""
        ...

    def require_all(self) -> None:
        """Raise ParallelError if a rank was lost: what collectives brought since is undefined."""
        ...

    def close(self, reason: str = CLOSED) -> None:
        """Leave the group for good. Calls of other ranks that wait for this one fail.

        ``reason``: the message of later calls of this rank, and in the errors of the others.
        """
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """The group of a single rank: nothing is exchanged."""

    rank: int = 0
    size: int = 1

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def all_gather_columns(self, x_TC: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        return x_TC

    def sum_disjoint(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather_int(self, number: int) -> list[int]:
        return [number]

    def all_gather_text(self, text: str) -> list[str]:
        return [text]

    def broadcast_bytes(self, data: bytes) -> bytes:
        return data

    def post(self, topic: str, text: str) -> None:
        pass

    def collect(self, topic: str) -> list[str]:
        return [""]

    def count_call(self) -> None:
        pass

    def require_all(self) -> None:
        pass

    def close(self, reason: str = CLOSED) -> None:
        pass


def check_alike(group: RankGroup, settings: Mapping[str, object]) -> None:
    """Raise ParallelError, on every rank, naming the first of the settings that another rank has
    otherwise than rank 0."""
    texts = group.all_gather_text(json.dumps(settings, default=_text))
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        other = json.loads(text)
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ParallelError(
                    f"{name} is {other.get(name)!r} on rank {rank} and {first.get(name)!r} on rank "
                    "0: start all ranks alike"
                )


def _text(value: object) -> str:
    """A value's text, equal in all processes: a function's own has its address."""
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)
