"""The collectives of ranks that run one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class RankGroup(Protocol):
    """Ranks that make the same calls in the same order.

    Each call is entered by every rank, and raises ParallelError where one does not come in time;
    the group is of no use then.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, all of one shape and dtype: [size, *x.shape]."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Element by element in rank order, in float32, rounded once to the dtype of x.

        An element's sum does not depend on its place, nor on how many there are. May be x itself.
        """
        ...

    def first(self, numbers: Sequence[float]) -> list[float]:
        """Rank 0's numbers; as many come from every rank."""
        ...

    def numbers(self, number: int) -> list[int]:
        """Every rank's number, of 64 bits, by rank."""
        ...

    def exchange(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        ...

    def tell(self, text: str) -> str:
        """Rank 0's text; what the others bring is not looked at."""
        ...

    def post(self, topic: str, text: str) -> None:
        """Leave a note that others may `collect`. Waits for nobody."""
        ...

    def collect(self, topic: str) -> list[str]:
        """Every rank's note on a topic, by rank, as soon as all have left theirs."""
        ...

    def close(self, reason: str = "the group is closed") -> None:
        """Leave for good. Others that wait for this rank hear that it is gone.

        ``reason``: what later calls of this rank are told.
        """
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A rank by itself: everything is its own already."""

    rank: int = 0
    size: int = 1

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def first(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def numbers(self, number: int) -> list[int]:
        return [number]

    def exchange(self, text: str) -> list[str]:
        return [text]

    def tell(self, text: str) -> str:
        return text

    def post(self, topic: str, text: str) -> None:
        pass

    def collect(self, topic: str) -> list[str]:
        return [""]

    def close(self, reason: str = "the group is closed") -> None:
        pass
