"""Ranks that are threads of one process: enough for layers, and for updates of their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from rollout.parallel import RankGroup
from tests.helpers.hang import HANG_SECONDS

T = TypeVar("T")


class Notes:
    """The notes that ranks post."""

    def __init__(self) -> None:
        self._posted: dict[tuple[str, int], str] = {}
        self._changed = threading.Condition()

    def post(self, topic: str, rank: int, text: str) -> None:
        with self._changed:
            self._posted[topic, rank] = text
            self._changed.notify_all()

    def collect(self, topic: str, size: int) -> list[str]:
        keys = [(topic, rank) for rank in range(size)]
        with self._changed:
            assert self._changed.wait_for(lambda: self._posted.keys() >= set(keys), HANG_SECONDS)
            return [self._posted[key] for key in keys]


class ThreadRank:
    """See RankGroup."""

    def __init__(
        self, rank: int, barrier: threading.Barrier, board: list[object], notes: Notes
    ) -> None:
        self.rank = rank
        self.size = barrier.parties
        self._barrier = barrier
        self._board = board
        self._notes = notes

    def _exchange(self, value: T) -> list[T]:
        self._board[self.rank] = value
        self._barrier.wait(HANG_SECONDS)
        values = list(self._board)
        self._barrier.wait(HANG_SECONDS)
        return values  # type: ignore[return-value]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x))

    def first(self, numbers: Sequence[float]) -> list[float]:
        return self._exchange(list(numbers))[0]

    def numbers(self, number: int) -> list[int]:
        return self._exchange(number)

    def exchange(self, text: str) -> list[str]:
        return self._exchange(text)

    def tell(self, data: bytes) -> bytes:
        return self._exchange(data)[0]

    def post(self, topic: str, text: str) -> None:
        self._notes.post(topic, self.rank, text)

    def collect(self, topic: str) -> list[str]:
        return self._notes.collect(topic, self.size)

    def close(self, reason: str = "") -> None:
        pass


def on_ranks(size: int, call: Callable[[RankGroup], T]) -> list[T]:
    """The results of ``call`` on ``size`` ranks, which run it at once on threads."""
    barrier, board, notes = threading.Barrier(size), [None] * size, Notes()
    with ThreadPoolExecutor(size) as pool:
        futures = [
            pool.submit(call, ThreadRank(rank, barrier, board, notes)) for rank in range(size)
        ]
        return [future.result(2 * HANG_SECONDS) for future in futures]
