"""Ranks that are threads of one process: enough for a layer, which only gathers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from rollout.parallel import RankGroup
from tests.helpers.hang import HANG_SECONDS

T = TypeVar("T")


class ThreadRank:
    """See RankGroup."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[object]) -> None:
        self.rank = rank
        self.size = barrier.parties
        self._barrier = barrier
        self._board = board

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
        raise AssertionError("no layer leaves notes")

    def collect(self, topic: str) -> list[str]:
        raise AssertionError("no layer leaves notes")

    def close(self, reason: str = "") -> None:
        pass


def on_ranks(size: int, call: Callable[[RankGroup], T]) -> list[T]:
    """The results of ``call`` on ``size`` ranks, which run it at once on threads."""
    barrier, board = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(call, ThreadRank(rank, barrier, board)) for rank in range(size)]
        return [future.result(2 * HANG_SECONDS) for future in futures]
