"""Ranks that are processes: on one host through shared memory, else by gloo; on GPUs by NCCL.

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
from rollout.parallel.exchange import Exchange, GroupExchange, open_host_exchange
from rollout.parallel.partition import consecutive
from rollout.parallel.rank_group import CLOSED, NO_MEMORY, Memory
from rollout.parallel.time_limit import answered

T = TypeVar("T")

_FIRST_BYTES = 1 << 10
"""Bytes that `broadcast_bytes` sends with their number: most calls of an engine fit into them."""


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
    ) -> None:
        """Wait until all ranks have connected.

        Args:
            store: the same for every rank, used by this group alone.
            device: where the tensors are that `all_gather` and `all_gather_columns` get.
            timeout: seconds that any call, this one included, waits for the others.

        Raises ParallelError if a rank does not come in time.
        """
        self.rank = rank
        self.size = size
        self._store = store
        self._lost = ""  # why the group is unusable
        self._timeout = timeout
        self._exchanges: list[Exchange] = []  # of numbers and texts, then of tensors
        host = open_host_exchange(rank, size, timeout, self._collected)
        self._exchanges.append(host or self._ask(self._gloo, timeout))
        if device.type == "cuda":
            self._exchanges.append(self._ask(self._nccl, timeout))
        self.broadcast_floats([0.0])  # connects

    def _gloo(self) -> Exchange:
        limit = timedelta(seconds=self._timeout)
        store = PrefixStore("gloo", self._store)
        return GroupExchange(dist.ProcessGroupGloo(store, self.rank, self.size, limit))

    def _nccl(self) -> Exchange:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout)
        store = PrefixStore("nccl", self._store)
        return GroupExchange(dist.ProcessGroupNCCL(store, self.rank, self.size, options))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = consecutive([x.numel()] * self.size)
        gathered = self.all_gather_columns(x.reshape(1, x.numel()), parts)
        return gathered.view(self.size, *x.shape)

    def all_gather_columns(
        self, x_TC: torch.Tensor, parts: Sequence[range], ahead: Memory = NO_MEMORY
    ) -> torch.Tensor:
        return self._run(lambda: self._exchanges[-1].all_gather_columns(x_TC, parts, ahead))

    def broadcast_floats(self, numbers: Sequence[float]) -> list[float]:
        return self._broadcast(torch.tensor(numbers, dtype=torch.float64)).tolist()

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
        own = np.frombuffer(data, dtype=np.uint8).copy()
        return self._broadcast(torch.from_numpy(own)).numpy().tobytes()

    def _broadcast(self, x: torch.Tensor) -> torch.Tensor:
        self._run(lambda: self._exchanges[0].broadcast(x))
        return x

    def post(self, topic: str, text: str) -> None:
        self._ask(lambda: self._store.set(f"{topic}/{self.rank}", text))

    def collect(self, topic: str) -> list[str]:
        keys = [f"{topic}/{rank}" for rank in range(self.size)]
        return self._ask(lambda: self._awaited(keys), self._timeout)

    def _collected(self, topic: str, text: str) -> list[str]:
        self.post(topic, text)
        return self.collect(topic)

    def _awaited(self, keys: Sequence[str]) -> list[str]:
        started = time.monotonic()
        while not self._store.check(list(keys)):
            gone = self._exchanges[0].gone() if self._exchanges else []
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            for rank in missing:
                if rank in gone:
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
        while self._exchanges:
            self._exchanges.pop().close()

    def _run(self, call: Callable[[], T]) -> T:
        self._require_all()
        try:
            return call()
        except ConnectionError as error:
            self._fail(error)

    def _ask(self, call: Callable[[], T], seconds: float = 0.0) -> T:
        """Make a call to the store that waits for other ranks at most ``seconds``."""
        self._require_all()
        try:
            return answered(call, seconds)
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            self._fail(error)

    def _require_all(self) -> None:
        if self._lost:
            raise ParallelError(f"rank {self.rank} of {self.size}: {self._lost}")

    def _fail(self, error: RuntimeError | OSError) -> NoReturn:
        reason = str(error).splitlines()[0].partition(". This")[0]
        is_late = "timed out" in reason.lower() or "timeout" in reason.lower()
        notes = {} if is_late else self._notes()
        if reason.startswith("rank "):
            note = notes.get(int(reason.split()[1]), "")
            reason = f"{reason}: {note}" if note else reason
        elif notes:  # gloo does not say which one
            rank, note = next(iter(notes.items()))
            reason = f"rank {rank} has left: {note}"
        else:
            late = f" or did not come in {self._timeout:g} seconds" if is_late else ""
            reason = f"a rank is gone{late} ({reason})"
        self._leave(f"{reason}; end all ranks and start them again")
        raise ParallelError(f"rank {self.rank} of {self.size}: {self._lost}") from error

    def _notes(self) -> dict[int, str]:
        """The reasons that other ranks posted as they left, by rank."""

        def read() -> dict[int, str]:
            keys = {rank: f"left/{rank}" for rank in range(self.size) if rank != self.rank}
            found = {rank: key for rank, key in keys.items() if self._store.check([key])}
            return {rank: self._store.get(key).decode() for rank, key in found.items()}

        try:
            return answered(read)
        except (RuntimeError, TimeoutError):  # its host is gone as well
            return {}
