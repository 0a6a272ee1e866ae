"""Ranks that are threads of one process: enough for layers, and for updates of their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from rollout.parallel import RankGroup
from rollout.parallel.exchange import bits_of
from tests.helpers.hang import HANG_SECONDS

T = TypeVar("T")


class Notes:
    """The notes that ranks post."""

    def __init__(self) -> None:
        self._posted: dict[tuple[str, int], str] = {}
        self._changed = threading.Condition()
        self._is_over = False

    def post(self, topic: str, rank: int, text: str) -> None:
        with self._changed:
            self._posted[topic, rank] = text
            self._changed.notify_all()

    def collect(self, topic: str, size: int) -> list[str]:
        keys = [(topic, rank) for rank in range(size)]
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._is_over or self._posted.keys() >= set(keys), HANG_SECONDS
            )
            assert found, f"a rank posted nothing on {topic!r}"
            assert not self._is_over, "a rank has failed"
            return [self._posted[key] for key in keys]

    def abort(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


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
        self.num_exchanges = 0

    def _exchange(self, value: T) -> list[T]:
        self.num_exchanges += 1
        self._board[self.rank] = value
        self._barrier.wait(HANG_SECONDS)
        values = list(self._board)
        self._barrier.wait(HANG_SECONDS)
        return values  # type: ignore[return-value]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x))

    def all_gather_columns(self, x_TC: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        return torch.cat(self._exchange(x_TC), 1)

    def sum_disjoint(self, x: torch.Tensor) -> torch.Tensor:
        bits = torch.stack([bits_of(each) for each in self._exchange(x.clone())])
        bits_of(x).copy_(bits.sum(0))
        return x

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x.clone())).sum(0))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(x.clone())[0])

    def all_gather_int(self, number: int) -> list[int]:
        return self._exchange(number)

    def all_gather_text(self, text: str) -> list[str]:
        return self._exchange(text)

    def broadcast_bytes(self, data: bytes) -> bytes:
        return self._exchange(data)[0]

    def post(self, topic: str, text: str) -> None:
        self._notes.post(topic, self.rank, text)

    def collect(self, topic: str) -> list[str]:
        return self._notes.collect(topic, self.size)

    def count_call(self) -> None:
        pass

    def require_all(self) -> None:
        pass

    def close(self, reason: str = "") -> None:
        pass


def on_ranks(size: int, call: Callable[[RankGroup], T]) -> list[T]:
    """The results of ``call`` on ``size`` ranks, which run it at once on threads. Where one of them
    raises, the others do not wait for it."""
    barrier, board, notes = threading.Barrier(size), [None] * size, Notes()

    def run(rank: int) -> T:
        try:
            return call(ThreadRank(rank, barrier, board, notes))
        except BaseException:
            barrier.abort()
            notes.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [future.exception(2 * HANG_SECONDS) for future in futures]
        first = [each for each in errors if not isinstance(each, threading.BrokenBarrierError)]
        for error in filter(None, [*first, *errors]):
            raise error
        return [future.result() for future in futures]
