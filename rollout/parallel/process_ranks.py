"""Ranks that are processes: they meet over gloo, and exchange tensors on GPUs by NCCL.

The process groups belong to this object. torch's default group, which a trainer in the same process
may have, is neither needed nor touched.

Legend: T rows of one rank, C columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rollout.errors import ParallelError
from rollout.parallel.exchange import GroupExchange
from rollout.parallel.partition import consecutive
from rollout.parallel.rank_address import RankAddress
from rollout.parallel.rank_group import CLOSED
from rollout.parallel.rank_watch import RankWatch
from rollout.parallel.time_limit import answered

T = TypeVar("T")

_FAILED_SECONDS = 1.0
"""The wait for other ranks to say that a call failed for them too."""

_WATCHDOG = 1.5  # timeouts

_FIRST_BYTES = 1 << 12
"""Bytes that `broadcast_bytes` sends with their number: most decoding steps fit into them."""


class ProcessRanks:
    """A `RankGroup` over processes."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout: float,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        """Wait until all ranks have connected.

        Args:
            store: the same for every rank, used by this group alone.
            device: where the tensors are that `all_gather` and `all_gather_columns` get.
            timeout: seconds that any call, this one included, waits for the others.
            lost: called on another thread with the reason why a rank is given up that this one
                waits for; default: `abort`.

        Raises ParallelError if a rank does not come in time.
        """
        self.rank = rank
        self.size = size
        self._store = store
        self._lost = ""  # why the group is unusable
        self._watch: RankWatch | None = None
        self._calls = 0
        self._device = device
        self._timeout = timeout
        self._address = RankAddress.here()
        self._addresses: list[RankAddress] = []  # of all ranks
        self._exchanges: list[GroupExchange] = []  # of numbers and texts, then of tensors
        self._exchanges.append(self._ask(self._gloo, timeout))
        if device.type == "cuda":
            self._exchanges.append(self._ask(self._nccl, timeout))
        self._addresses = [
            RankAddress.of(text) for text in self.all_gather_text(self._address.text)
        ]
        self._watch = RankWatch(
            rank,
            self._addresses,
            store,
            timeout,
            calls=lambda: self._calls,
            lost=lost or self.abort,
        )

    def abort(self, reason: str) -> None:
        """Give a rank up: end the collectives that the device waits in. Those on the host end by
        themselves."""
        if self._device.type == "cuda":
            self._lost = f"{reason}; end all ranks and start them again"
            for exchange in self._exchanges[-1:]:  # none once this rank has left
                exchange.abort()

    def _gloo(self) -> GroupExchange:
        limit = timedelta(seconds=self._timeout)
        store = PrefixStore("gloo", self._store)
        return GroupExchange(dist.ProcessGroupGloo(store, self.rank, self.size, limit))

    def _nccl(self) -> GroupExchange:
        options = dist.ProcessGroupNCCL.Options()
        # Its own watchdog ends the process; `RankWatch` is there first.
        options._timeout = timedelta(seconds=_WATCHDOG * self._timeout)
        store = PrefixStore("nccl", self._store)
        return GroupExchange(dist.ProcessGroupNCCL(store, self.rank, self.size, options))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = consecutive([x.numel()] * self.size)
        gathered = self.all_gather_columns(x.reshape(1, x.numel()), parts)
        return gathered.view(self.size, *x.shape)

    def all_gather_columns(self, x_TC: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
        return self._run(lambda: self._exchanges[-1].all_gather_columns(x_TC, parts))

    def sum_disjoint(self, x: torch.Tensor) -> torch.Tensor:
        self._run(lambda: self._exchanges[-1].sum_disjoint(x))
        return x

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._run(lambda: self._exchanges[-1].all_reduce(x))
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._run(lambda: self._exchanges[-1].broadcast(x))
        return x

    def all_gather_int(self, number: int) -> list[int]:
        own = torch.tensor([[number]], dtype=torch.int64)
        return self._gather_host(own, [1] * self.size).tolist()

    def all_gather_text(self, text: str) -> list[str]:
        own = np.frombuffer(text.encode(), dtype=np.uint8).copy()
        sizes = self.all_gather_int(own.size)
        data = self._gather_host(torch.from_numpy(own)[None], sizes).numpy().tobytes()
        return [data[part.start : part.stop].decode() for part in consecutive(sizes)]

    def broadcast_bytes(self, data: bytes) -> bytes:
        head = data[:_FIRST_BYTES] if self.rank == 0 else b""
        sent = len(data).to_bytes(8, "little") + head.ljust(_FIRST_BYTES, b"\0")
        received = self._broadcast_bytes(sent)
        size = int.from_bytes(received[:8], "little")
        if size <= _FIRST_BYTES:
            return received[8 : 8 + size]
        return self._broadcast_bytes(data if self.rank == 0 else bytes(size))

    def _gather_host(self, own_1C: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        parts = consecutive(widths)
        return self._run(lambda: self._exchanges[0].all_gather_columns(own_1C, parts))[0]

    def _broadcast_bytes(self, data: bytes) -> bytes:
        own = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        self._run(lambda: self._exchanges[0].broadcast(own))
        return own.numpy().tobytes()

    def post(self, topic: str, text: str) -> None:
        self._ask(lambda: self._store.set(f"{topic}/{self.rank}", text))

    def collect(self, topic: str) -> list[str]:
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        return self._ask(lambda: self._awaited(keys), self._timeout)

    def _awaited(self, keys: Sequence[str]) -> list[str]:
        started = time.monotonic()
        while not self._store.check(list(keys)):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            for rank in self._gone(missing):
                raise ConnectionError(f"rank {rank} has ended or left")
            waited = time.monotonic() - started
            if missing and waited > self._timeout:
                names = " and ".join(f"rank {rank}" for rank in missing)
                raise TimeoutError(f"{names} did not come in {self._timeout:g} seconds")
            # The end is seen late by a twentieth of the wait at most.
            time.sleep(min(max(0.001, waited / 20), 0.05))
        return [self._store.get(key).decode() for key in keys]

    def close(self, reason: str = CLOSED) -> None:
        if not self._lost and reason != CLOSED:
            with suppress(RuntimeError, TimeoutError):  # without a store they hear no reason
                answered(lambda: self._store.set(f"left/{self.rank}", reason))
        self._leave(reason)

    def _leave(self, reason: str) -> None:
        self._lost = self._lost or reason
        if self._watch is not None:
            self._watch.close()
        while self._exchanges:
            self._exchanges.pop().close()

    def _run(self, call: Callable[[], T]) -> T:
        self.require_all()
        self.count_call()
        try:
            return call()
        except ConnectionError as error:
            self._fail(error)

    def _ask(self, call: Callable[[], T], seconds: float = 0.0) -> T:
        """Make a call to the store that waits for other ranks at most ``seconds``."""
        self.require_all()
        try:
            return answered(call, seconds)
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            self._fail(error)

    def count_call(self) -> None:
        self._calls += 1

    def require_all(self) -> None:
        if self._lost:
            raise ParallelError(f"rank {self.rank} of {self.size}: {self._lost}")

    def _fail(self, error: RuntimeError | OSError) -> NoReturn:
        text = str(error).splitlines()[0].partition(". This")[0]
        is_late = "timed out" in text.lower() or "timeout" in text.lower()
        self._leave(text)  # so that others that wait for this rank fail too, and say so
        silent, notes = self._others()
        names = " or ".join(f"rank {rank}" for rank in self._gone(silent) or silent)
        if notes:
            rank, note = next(iter(notes.items()))
            reason = f"rank {rank} has ended or left: {note}"
        elif text.startswith("rank "):
            reason = text
        elif is_late and silent:
            reason = f"{names} did not come in {self._timeout:g} seconds"
        else:
            reason = f"{names or 'a rank'} has ended or left ({text})"
        self._lost = f"{reason}; end all ranks and start them again"
        raise ParallelError(f"rank {self.rank} of {self.size}: {self._lost}") from error

    def _gone(self, ranks: Sequence[int]) -> list[int]:
        """Those of these ranks whose processes have ended, as far as this host can see."""
        if not self._addresses:
            return []
        return [rank for rank in ranks if self._addresses[rank].is_gone(self._address)]

    def _others(self) -> tuple[list[int], dict[int, str]]:
        """The ranks that do not say soon that a call failed for them too, and the reasons of those
        that left for one. All of them, and no reasons, where the store is gone with its host."""
        others = [rank for rank in range(self.size) if rank != self.rank]

        def ask() -> tuple[list[int], dict[int, str]]:
            self._store.set(f"failed/{self.rank}", "")
            deadline = time.monotonic() + _FAILED_SECONDS
            while True:
                left = [rank for rank in others if self._store.check([f"left/{rank}"])]
                notes = {rank: self._store.get(f"left/{rank}").decode() for rank in left}
                silent = [rank for rank in others if not self._store.check([f"failed/{rank}"])]
                if notes or len(silent) < 2 or time.monotonic() > deadline:
                    return silent, notes
                time.sleep(0.02)

        try:
            return answered(ask, _FAILED_SECONDS)
        except (RuntimeError, TimeoutError):
            return others, {}
