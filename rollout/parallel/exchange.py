"""Exchange of tensors between ranks: through memory that the ranks of one host share, or through a
process group of torch.distributed, such as gloo's.

Legend: N ranks, T rows of one rank, C columns.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from rollout.parallel.rank_group import NO_MEMORY, Memory

try:
    from rollout.parallel import _exchange as native
except ImportError:  # not Linux, or an unbuilt source tree
    native = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

Collect = Callable[[str, str], list[str]]
"""Posts this rank's note on a topic, and returns every rank's."""


class Exchange(Protocol):
    """Collectives of all ranks. Each raises ConnectionError if a rank does not come in time."""

    def all_gather_columns(
        self, x_TC: torch.Tensor, parts: Sequence[range], ahead: Memory = NO_MEMORY
    ) -> torch.Tensor:
        """See `RankGroup.all_gather_columns`."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite ``x``, which is contiguous, with rank 0's. Every rank's has the same shape and
        dtype."""
        ...

    def gone(self) -> list[int]:
        """Ranks that are known to have ended or left."""
        ...

    def close(self) -> None:
        """Leave. Calls of other ranks that wait for this one fail."""
        ...


class GroupExchange:
    """An `Exchange` over a process group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_gather_columns(
        self, x_TC: torch.Tensor, parts: Sequence[range], ahead: Memory = NO_MEMORY
    ) -> torch.Tensor:
        rows, width = len(x_TC), max(map(len, parts))
        x_TC = pad(x_TC, (0, width - x_TC.shape[1])).contiguous()
        gathered_NTC = x_TC.new_empty(len(parts), rows, width)
        if x_TC.numel():
            flat = gathered_NTC.view(-1)
            self._run(lambda: self._group._allgather_base(flat, x_TC.view(-1)))
        if rows == 1 and all(len(part) == width for part in parts):
            return gathered_NTC.view(1, len(parts) * width)
        pairs = zip(gathered_NTC, parts, strict=True)
        return torch.cat([each_TC[:, : len(part)] for each_TC, part in pairs], 1)

    def broadcast(self, x: torch.Tensor) -> None:
        if x.numel():
            self._run(lambda: self._group.broadcast(x, 0))

    def gone(self) -> list[int]:
        return []  # shown by the next collective alone

    def close(self) -> None:
        self._group = None

    def _run(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error


class HostExchange:
    """An `Exchange` through shared memory, of tensors on the CPU."""

    def __init__(self, exchange: native.Exchange) -> None:
        self._exchange = exchange

    def all_gather_columns(
        self, x_TC: torch.Tensor, parts: Sequence[range], ahead: Memory = NO_MEMORY
    ) -> torch.Tensor:
        if x_TC.stride(1) != 1:
            x_TC = x_TC.contiguous()
        rows, bytes_each = len(x_TC), x_TC.element_size()
        gathered_TC = x_TC.new_empty(rows, parts[-1].stop)
        try:
            self._exchange.gather_columns(
                x_TC.data_ptr(),
                rows,
                x_TC.stride(0) * bytes_each,
                [part.stop * bytes_each for part in parts],
                gathered_TC.data_ptr(),
                *ahead,
            )
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        return gathered_TC

    def broadcast(self, x: torch.Tensor) -> None:
        try:
            self._exchange.broadcast(x.data_ptr(), x.nbytes)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error

    def gone(self) -> list[int]:
        return self._exchange.gone()

    def close(self) -> None:
        self._exchange.leave()


def open_host_exchange(rank: int, size: int, timeout: float, collect: Collect) -> Exchange | None:
    """The exchange of ranks that are all on one host; None, on every rank, of others.

    Args:
        timeout: seconds that a call waits for the others.
        collect: waits until all have posted.
    """
    own, offer = None, ""
    try:
        if native is not None:
            offer = this_host()
            if rank == 0:
                own = native.Exchange.create(size, timeout)
                offer += f" {own.path}"
    except (OSError, RuntimeError) as error:  # no /proc; no memory
        log.warning("ranks cannot share memory, so they exchange by gloo: %s", error)
        offer = ""
    offers = collect("host", offer)
    host, _, path = offers[0].rpartition(" ")
    if not host or set(offers[1:]) != {host}:
        return None
    failure = ""
    try:
        own = own or native.Exchange.open(path, rank, size, timeout)
    except RuntimeError as error:  # of another user, who may not
        failure = str(error)
    failures = collect("shared memory", failure)
    for other, why in enumerate(failures):
        if why:
            log.warning("rank %d shares no memory, so ranks exchange by gloo: %s", other, why)
    return None if own is None or any(failures) else HostExchange(own)


def this_host() -> str:
    """A text that is the same for processes that can open each other's memory by process id."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel}/{os.readlink('/proc/self/ns/pid')}"
