"""Groups of one sender and its receivers, with a store and a process group of their own.

The backend nccl has never been run: it was written by reading torch 2.13, gloo is what is tested.
Torch's watchdog ends a process of which an NCCL peer has died, whatever is caught here, and takes
that from the environment alone, for every group of the process: TORCH_NCCL_ASYNC_ERROR_HANDLING=0
before torch makes one turns it into an error that can be survived. A group that is joined without
logs a warning.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.parallel.time_limit import answered
from rollout.validation import checked_int, checked_name, checked_seconds

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.001
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SURVIVABLE = ("0", "2")  # nothing is done, or the communicator alone is aborted
_DEVICE_TYPES = {"gloo": "cpu", "nccl": "cuda"}  # under which torch keeps a backend's keys


class WeightGroup:
    """This process's place among one sender, rank 0, and its receivers, ranks 1 and up.

    Torch's default group is neither needed nor touched, so a trainer's own groups never meet this
    one. Rank 0 hosts the store, and waits in it for every member. It is a `WeightGroup`, or a group
    that a trainer written for other engines makes with ``init_method="tcp://address:port"``: what
    has to be the same here is where torch puts that group's keys in the store, which is tested
    against torch itself. With nccl the members connect in the first broadcast, which no timeout
    ends.

    Args:
        backend: ``gloo`` for tensors on the CPU, ``nccl`` for tensors on a GPU. Needs to be the
            same everywhere.
        device: the GPU with nccl; default: the one that is current now.
        timeout: seconds; for joining, and the default for every wait after.

    Raises WeightUpdateError where members do not come in time, InvalidInputError for arguments.
    """

    def __init__(
        self,
        *,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str = "gloo",
        device: torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.name = checked_name(group_name, "group_name")
        self.world_size = checked_int(world_size, "world_size", minimum=2, maximum=2**16)
        self.rank = checked_int(rank, "rank", maximum=world_size - 1)
        self.backend = _checked_backend(backend)
        self.device = _device(self.backend, device)
        """The device that broadcast tensors must be on."""
        self.timeout = checked_seconds(timeout, "timeout")
        self._address = master_address
        self._port = checked_int(master_port, "master_port", minimum=1, maximum=65535)
        self.closed_because = ""
        keys = PrefixStore(f"{self.name}/", PrefixStore(self.name, self._connect()))
        self._group: Any = self._process_group(PrefixStore(f"{_DEVICE_TYPES[backend]}/", keys))
        """Torch's; None when closed."""

    def broadcast(self, tensor: torch.Tensor, timeout: float | None = None) -> None:
        """Rank 0's contiguous tensor into everybody's. Returns when it is there.

        Raises WeightUpdateError where that fails or takes longer than ``timeout`` seconds; the
        group is closed then, which ends the others' waiting too.
        """
        seconds = self.timeout if timeout is None else timeout
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=seconds)
        if self._group is None:
            raise WeightUpdateError(f"group {self.name!r} is closed: {self.closed_because}")
        try:
            work = self._group.broadcast([tensor.detach()], options)
            if self.backend == "nccl":
                _poll(work, seconds)
            work.wait()
        except RuntimeError as error:
            reason = f"a broadcast failed: {str(error).splitlines()[0]}"
            self.close(reason)
            # A traceback would keep the work, and the work the connections that others wait on.
            cause = error.with_traceback(None)
            raise WeightUpdateError(f"group {self.name!r}: {reason}") from cause

    def close(self, reason: str = "it was destroyed") -> None:
        """Leave: the connections end, and nothing can be broadcast any more."""
        if self._group is not None and self.backend == "nccl":
            self._group.abort()
        self.closed_because = self.closed_because or reason
        self._group = None

    def _connect(self) -> TCPStore:
        """Wait in rank 0's store for every member."""

        def make() -> TCPStore:
            return TCPStore(
                self._address, self._port, self.world_size, self.rank == 0,
                timeout=timedelta(seconds=self.timeout),
            )  # fmt: skip

        try:
            return answered(make, self.timeout)
        except (RuntimeError, TimeoutError) as error:
            role = "opened by this rank 0" if self.rank == 0 else "reached; rank 0 is missing"
            raise WeightUpdateError(
                f"group {self.name!r}: the store at {self._address}:{self._port} cannot be {role} "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _process_group(self, store: Store) -> Any:
        def make() -> Any:
            if self.backend == "gloo":
                timeout = timedelta(seconds=self.timeout)
                return dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
            _warn_of_error_handling(self.name)
            options = dist.ProcessGroupNCCL.Options()
            # Its watchdog ends the process; ours, which raises, must come first.
            options._timeout = timedelta(seconds=2 * self.timeout + 60)
            return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)

        try:
            return answered(make, self.timeout)
        except (RuntimeError, TimeoutError) as error:
            raise WeightUpdateError(
                f"group {self.name!r}: the members cannot connect: {str(error).splitlines()[0]}"
            ) from error


def _checked_backend(value: object) -> str:
    if value not in ("gloo", "nccl"):
        raise InvalidInputError("backend", value, "must be gloo or nccl")
    if value == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise InvalidInputError("backend", value, "needs a GPU and a torch with NCCL; use gloo")
    return str(value)


def _device(backend: str, device: torch.device | None) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if device is None or device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _warn_of_error_handling(group_name: str) -> None:
    if os.environ.get(_ERROR_HANDLING) not in _SURVIVABLE:
        log.warning(
            "group %r: a peer that dies ends this process; start it with %s=0 to survive that",
            group_name, _ERROR_HANDLING,
        )  # fmt: skip


def _poll(work: Any, seconds: float) -> None:
    """NCCL's own wait would end the process at its timeout, so its works are polled."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing came for {seconds:g} seconds")
        time.sleep(_POLL_SECONDS)
