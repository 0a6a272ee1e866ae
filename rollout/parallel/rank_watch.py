"""Notices the end of other ranks' processes while this one waits for a device.

A collective on a GPU is awaited by the device, not by the host: what it waits for is not seen to
have gone before NCCL's own limit, minutes later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from rollout.parallel.rank_address import RankAddress

_SECONDS = 0.2


class RankWatch:
    """A thread that looks every 0.2 s whether ranks of this host live."""

    def __init__(
        self,
        here: RankAddress,
        others: Mapping[int, RankAddress],
        lost: Callable[[int], None],
    ) -> None:
        """``lost``: called once, on the thread, with the first rank that is gone."""
        self._here = here
        self._others = others
        self._lost = lost
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="rank watch", daemon=True).start()

    def close(self) -> None:
        """Watch no longer."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(_SECONDS):
            for rank, address in self._others.items():
                if address.is_gone(self._here):
                    self._lost(rank)
                    return
