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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.parallel.time_limit import answered, within
from rollout.validation import checked_int, checked_name, checked_seconds
from rollout.weights.group_store import GroupStore

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.001
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SURVIVABLE = ("0", "2")  # nothing is done, or the communicator alone is aborted


def listen(address: str, timeout: float = 300.0) -> TCPStore:
    """A store on a free port of this host, for a WeightGroup's rank 0; its ``port`` says which."""
    return TCPStore(
        address, 0, None, True, timeout=timedelta(seconds=timeout), wait_for_workers=False
    )


class BroadcastGroup(ABC):
    """This process's place among one sender, rank 0, and its receivers, ranks 1 and up.

    Torch's default group is neither needed nor touched, so a trainer's own groups never meet this
    one. How the members meet is for subclasses to say.

    Args:
        backend: ``gloo`` for tensors on the CPU, ``nccl`` for tensors on a GPU. Needs to be the
            same everywhere.
        device: the GPU with nccl; default: the one that is current now.
        timeout: seconds; for joining, and the default for every wait after.
        store: what `listen` returned, on rank 0, instead of a port chosen beforehand.

    Raises WeightUpdateError where members do not come in time, InvalidInputError for arguments.
    """

    notes: GroupStore

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
        store: TCPStore | None = None,
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
        self.last_update = 0  # number of the last update sent or received
        self.num_bytes = 0  # received so far
        self.closed_because = ""
        self._group: Any = None  # of torch's, None when closed
        self._meet(store)

    @abstractmethod
    def _meet(self, store: TCPStore | None) -> None:
        """Connect to the others: leaves a store for notes and torch's group."""

    def broadcast(self, tensor: torch.Tensor, timeout: float | None = None) -> None:
        """Rank 0's contiguous tensor into everybody's. Returns when it is there.

        Raises WeightUpdateError where that fails or takes longer than ``timeout`` seconds; the
        group is closed then, which ends the others' waiting too.
        """
        seconds = self.timeout if timeout is None else timeout
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=seconds)
        self._run("broadcast", lambda group: [group.broadcast([tensor.detach()], options)], seconds)
        self.num_bytes += tensor.nbytes if self.rank else 0

    def send(self, tensors: Mapping[int, torch.Tensor], timeout: float) -> None:
        """Rank 0's contiguous tensors to these ranks, each of which is to `receive` its own.

        Returns and raises as `broadcast` does.
        """
        self._run(
            "send",
            lambda group: [group.send([each], rank, 0) for rank, each in tensors.items()],
            timeout,
        )

    def receive(self, tensor: torch.Tensor, timeout: float) -> None:
        """Receive into a contiguous tensor what rank 0 sends to this rank. Raises as `broadcast`
        does."""
        self._run("receive", lambda group: [group.recv([tensor], 0, 0)], timeout)
        self.num_bytes += tensor.nbytes

    def _run(self, what: str, start: Callable[[Any], list[Any]], seconds: float) -> None:
        """Start works of torch's group and wait for them."""
        if self._group is None:
            raise WeightUpdateError(f"group {self.name!r} is closed: {self.closed_because}")
        try:
            _wait(start(self._group), self.backend, seconds, own_timeout=what == "broadcast")
        except RuntimeError as error:
            reason = f"a {what} failed: {str(error).splitlines()[0]}"
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

    def _connect(self, members: int | None = None) -> TCPStore:
        """Connect to rank 0's store. ``members``: wait there for so many, this one counted."""

        def make() -> TCPStore:
            return TCPStore(
                self._address, self._port, members, self.rank == 0,
                timeout=timedelta(seconds=self.timeout), wait_for_workers=members is not None,
            )  # fmt: skip

        try:
            return answered(make, self.timeout)
        except (RuntimeError, TimeoutError) as error:
            role = "opened by this rank 0" if self.rank == 0 else "reached; rank 0 is missing"
            raise WeightUpdateError(
                f"group {self.name!r}: the store at {self._address}:{self._port} cannot be {role} "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _process_group(self, store: Store, seconds: float) -> Any:
        """``store``: of its own keys, the same for every member."""

        def make() -> Any:
            if self.backend == "gloo":
                timeout = timedelta(seconds=seconds)
                return dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
            _warn_of_error_handling(self.name)
            options = dist.ProcessGroupNCCL.Options()
            # Its watchdog ends the process; ours, which raises, must come first.
            options._timeout = timedelta(seconds=2 * self.timeout + 60)
            return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)

        try:
            return answered(make, seconds)
        except (RuntimeError, TimeoutError) as error:
            raise WeightUpdateError(
                f"group {self.name!r}: the members cannot connect: {str(error).splitlines()[0]}"
            ) from error


class WeightGroup(BroadcastGroup):
    """A group of which every member is one of these, and so knows who is there.

    Rank 0 hosts the store at ``master_address:master_port``; one store serves one group. Raises
    WeightUpdateError, naming ranks, where members are missing after the timeout, were told another
    size or backend, or claim one rank twice.
    """

    def _meet(self, store: TCPStore | None) -> None:
        started = time.monotonic()
        store = store or self._connect()
        self.notes = GroupStore(store, self.name)
        self._join()
        remaining = max(self.timeout - (time.monotonic() - started), 1.0)
        own = PrefixStore(f"{self.backend}/{self.name}", store)
        self._group = self._process_group(own, remaining)
        self._connect_members(remaining)

    @property
    def receivers(self) -> range:
        """The ranks that weights are sent to."""
        return range(1, self.world_size)

    def _join(self) -> None:
        """Wait for every member. Raises WeightUpdateError naming who is missing or was configured
        differently."""
        mine = {"world_size": self.world_size, "backend": self.backend}
        if not self.notes.claim(f"member/{self.rank}", mine | {"nonce": time.time_ns()}):
            raise WeightUpdateError(f"group {self.name!r}: rank {self.rank} is taken already")
        deadline = time.monotonic() + self.timeout
        while True:
            found = {rank: self.notes.get(f"member/{rank}") for rank in range(self.world_size)}
            for rank, theirs in found.items():
                given = None if theirs is None else {key: theirs[key] for key in mine}
                if given is not None and given != mine:
                    raise WeightUpdateError(
                        f"group {self.name!r}: rank {rank} was given {given}, "
                        f"rank {self.rank} {mine}"
                    )
            missing = [str(rank) for rank, theirs in found.items() if theirs is None]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"group {self.name!r}: of {self.world_size} ranks, missing after "
                    f"{self.timeout:g} seconds: {', '.join(missing)}"
                )
            time.sleep(0.01)

    def _connect_members(self, seconds: float) -> None:
        """Broadcast a byte, since NCCL connects in the first broadcast, which no timeout of its own
        ends."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        try:
            within(seconds, lambda: self.broadcast(byte, seconds))
        except TimeoutError as error:
            self._group, self.closed_because = None, "its members did not connect"
            raise WeightUpdateError(
                f"group {self.name!r}: the members did not connect in {seconds:g} seconds"
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


def _wait(works: list[Any], backend: str, seconds: float, *, own_timeout: bool) -> None:
    """NCCL's own wait would end the process at its timeout, so CUDA works are polled."""
    deadline = time.monotonic() + seconds
    for work in works:
        while backend == "nccl" and not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing came for {seconds:g} seconds")
            time.sleep(_POLL_SECONDS)
        # A broadcast's own timeout says more than this one.
        work.wait(timedelta(seconds=0 if own_timeout else seconds))
