"""Ranks that are processes, by torch's own transports: gloo on the CPU, NCCL on GPUs.

The process groups belong to this object. torch's default group, which a trainer in the same process
may have, is neither needed nor touched.

Legend: N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rollout.errors import ParallelError
from rollout.parallel.time_limit import answered

T = TypeVar("T")


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
            timeout: seconds that any call, this one included, waits for the others.

        Raises ParallelError if a rank does not come in time.
        """
        self.rank = rank
        self.size = size
        self._store = store
        self._device = device
        self._lost = ""  # why the group is unusable
        self._timeout = timedelta(seconds=timeout)
        self._groups: list[Any] = []

        def meet() -> None:
            gloo = PrefixStore("gloo", store)
            self._groups.append(dist.ProcessGroupGloo(gloo, rank, size, self._timeout))
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                nccl = PrefixStore("nccl", store)
                self._groups.append(dist.ProcessGroupNCCL(nccl, rank, size, options))

        self._ask(meet, timeout)
        self.first([0.0])  # connects

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel():
            flat = gathered.view(-1)
            self._run(lambda: self._groups[-1]._allgather_base(flat, x.contiguous().view(-1)))
        return gathered

    def first(self, numbers: Sequence[float]) -> list[float]:
        values = torch.tensor(numbers, dtype=torch.float64)
        self._run(lambda: self._groups[0].broadcast(values, 0))
        return values.tolist()

    def numbers(self, number: int) -> list[int]:
        gathered = self._gather_bytes(np.array([number], dtype=np.int64).view(np.uint8))
        return gathered.view(np.int64)[:, 0].tolist()

    def exchange(self, text: str) -> list[str]:
        data = np.frombuffer(text.encode(), dtype=np.uint8)
        sizes = self.numbers(data.size)
        padded = np.zeros(max(sizes), dtype=np.uint8)
        padded[: data.size] = data
        rows = self._gather_bytes(padded)
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def tell(self, data: bytes) -> bytes:
        (size,) = self.first([len(data)])
        told = np.zeros(int(size), dtype=np.uint8)
        if self.rank == 0:
            told[:] = np.frombuffer(data, dtype=np.uint8)
        if told.size:
            self._run(lambda: self._groups[0].broadcast(torch.from_numpy(told), 0))
        return told.tobytes()

    def _gather_bytes(self, data: np.ndarray) -> np.ndarray:
        gathered = torch.empty((self.size, data.size), dtype=torch.uint8)
        if data.size:
            own = torch.from_numpy(data.copy())
            self._run(lambda: self._groups[0]._allgather_base(gathered.view(-1), own))
        return gathered.numpy()

    def post(self, topic: str, text: str) -> None:
        self._ask(lambda: self._store.set(f"{topic}/{self.rank}", text))

    def collect(self, topic: str) -> list[str]:
        keys = [f"{topic}/{rank}" for rank in range(self.size)]

        def wait() -> list[str]:
            self._store.wait(keys, self._timeout)
            return [self._store.get(key).decode() for key in keys]

        return self._ask(wait, self._timeout.total_seconds())

    def close(self, reason: str = "the group is closed") -> None:
        self._lost = self._lost or reason
        self._groups.clear()

    def _run(self, start: Callable[[], Any]) -> None:
        self._require_all()
        try:
            start().wait()
        except RuntimeError as error:
            self._fail(error)

    def _require_all(self) -> None:
        if self._lost:
            raise ParallelError(f"rank {self.rank} of {self.size}: {self._lost}")

    def _ask(self, call: Callable[[], T], seconds: float = 0.0) -> T:
        """Make a call to the store that waits for other ranks at most ``seconds``."""
        self._require_all()
        try:
            return answered(call, seconds)
        except (RuntimeError, TimeoutError) as error:
            self._fail(error)

    def _fail(self, error: RuntimeError | TimeoutError) -> NoReturn:
        reason = str(error).splitlines()[0].partition(". This")[0]
        is_late = "timed out" in reason.lower() or "timeout" in reason.lower()
        late = f" or did not come in {self._timeout.total_seconds():g} seconds" if is_late else ""
        self._lost = f"a rank is gone{late} ({reason}); end all ranks and start them again"
        self._groups.clear()
        raise ParallelError(f"rank {self.rank} of {self.size}: {self._lost}") from error
