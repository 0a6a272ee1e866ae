"""Notices other ranks that end, stop or hang while this one waits for them.

A collective on a GPU is awaited by the device, not by the host: a rank that it waits for is not
seen to be missing before NCCL's own limit, minutes later, which ends the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from rollout.parallel.rank_address import RankAddress

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_NAMED_SECONDS = 1.0  # at least, so that ranks that wait too have said how many calls they made
_NAMED_SHARE = 1 / 60
"""The part of the timeout after which a rank that others wait for is named in the log."""


class RankWatch:
    """A thread that looks every 0.2 s whether the other ranks of a group live, and make the calls
    that this one has made.

    A rank that makes no calls tells the others, through the store, how many it has made: one with
    fewer than this is waited for.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[RankAddress],
        store: Store,
        timeout: float,
        *,
        calls: Callable[[], int],
        lost: Callable[[str], None],
    ) -> None:
        """
        Args:
            rank: this one.
            addresses: of all ranks.
            store: of the group.
            timeout: seconds that a rank may be waited for.
            calls: how many calls this rank has made.
            lost: called once, on the thread, with the reason why a rank is given up.
        """
        self._rank = rank
        self._addresses = list(addresses)
        self._store = store
        self._timeout = timeout
        self._named_seconds = min(timeout, max(_NAMED_SECONDS, timeout * _NAMED_SHARE))
        self._calls = calls
        self._lost = lost
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="rank watch", daemon=True).start()

    def close(self) -> None:
        """Watch no longer."""
        self._is_over.set()

    def _watch(self) -> None:
        made, since, told, named = -1, 0.0, -1, -1  # calls: made so far, told, at which one named
        while not self._is_over.wait(_LOOK_SECONDS):
            if gone := [rank for rank in self._others() if self._is_gone(rank)]:
                self._lost(f"rank {gone[0]} has ended or left")
                return
            if self._calls() != made:
                made, since = self._calls(), time.monotonic()
                continue
            waited = time.monotonic() - since
            try:
                if told != made:
                    self._store.set(f"calls/{self._rank}", str(made))
                    told = made
                if waited < self._named_seconds:
                    continue
                late = [rank for rank in self._others() if self._calls_of(rank) < made]
            except RuntimeError:  # the store is gone with its host; the next call says so
                return
            if late and named != made:
                named = made
                log.warning("rank %d waits for %s", self._rank, self._described(late))
            if late and waited > self._timeout:
                self._lost(f"rank {late[0]} did not come in {self._timeout:g} seconds")
                return

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._addresses)) if rank != self._rank]

    def _is_gone(self, rank: int) -> bool:
        return self._addresses[rank].is_gone(self._addresses[self._rank])

    def _calls_of(self, rank: int) -> int:
        """The calls that a rank had made when it last made none for a while."""
        key = f"calls/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _described(self, ranks: Sequence[int]) -> str:
        here = self._addresses[self._rank]
        return " and ".join(
            f"rank {rank} ({self._addresses[rank].described(here)})" for rank in ranks
        )
