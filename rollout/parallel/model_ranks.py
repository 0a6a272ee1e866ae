"""Opens the rank groups of this process, from its configuration and its launcher's environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from rollout.config import ParallelConfig, ParallelMode
from rollout.errors import EngineStateError, InvalidInputError, ParallelError
from rollout.parallel.process_ranks import ProcessRanks
from rollout.parallel.rank_group import CLOSED, RankGroup, SingleRank
from rollout.parallel.rank_leader import Ended, RankLeader
from rollout.parallel.time_limit import answered


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRanks:
    """The rank groups of a model, as one rank sees them.

    ``tensor``: ranks that run the same rows; heads and the vocabulary are split among them.
    ``rows``: ranks that have the same heads and each run rows of their own, in lockstep.
    ``all``: both together, T tensor ranks times R ranks of rows. MLPs and experts are split among
    them by output features and compute the rows of all. Global rank r is tensor rank r % T.
    ``leader``: how the first of the tensor ranks says what they run.
    """

    tensor: RankGroup = field(default_factory=SingleRank)
    rows: RankGroup = field(default_factory=SingleRank)
    all: RankGroup
    leader: RankLeader = field(default_factory=RankLeader)

    @staticmethod
    def of_tensor(group: RankGroup, leader: RankGroup | None = None) -> ModelRanks:
        """All ranks run the same rows."""
        return ModelRanks(tensor=group, all=group, leader=RankLeader(leader))

    @staticmethod
    def of_rows(group: RankGroup) -> ModelRanks:
        """Each rank runs rows of its own."""
        return ModelRanks(rows=group, all=group)

    @property
    def of_drafts(self) -> ModelRanks:
        """The ranks of a draft: it is small, so tensor-parallel ranks each have all of it."""
        return ModelRanks.of_rows(self.rows)

    def all_or_none(
        self, when: str, raised_by_all: type[BaseException] | tuple[()] = ()
    ) -> AbstractContextManager[None]:
        """A context for what ranks do together: a failure on this one closes the group, so that the
        others, in the middle of it, hear of that at once.

        Args:
            when: said in their error, such as "in the middle of a step".
            raised_by_all: errors that all ranks raise alike.
        """
        return _AllOrNone(self, when, raised_by_all)

    @contextmanager
    def telling(
        self, message: object, raised_by_all: type[BaseException] | tuple = ()
    ) -> Iterator[None]:
        """A context for what this rank, the first of its tensor ranks, runs with the others; the
        message says what. ``raised_by_all``: see `all_or_none`.

        Raises EngineStateError where nobody follows, ParallelError where a rank is lost.
        """
        if self.tensor.size == 1:
            yield
            return
        self.leader.require_followed()
        with self.all_or_none("in the middle of what all ranks run", raised_by_all):
            self.leader.tell(message)
            yield
            self.tensor.count_call()  # a captured graph's collectives are not counted

    def sharing(
        self, message: object, raised_by_all: type[BaseException] | tuple = ()
    ) -> AbstractContextManager[None]:
        """As `telling` while other ranks follow; otherwise a context that does nothing."""
        return self.telling(message, raised_by_all) if self.leader.is_followed else nullcontext()

    def follow(self, run: Callable[[Any], None]) -> Any:
        """Run what the first of the tensor ranks tells until it ends its lead; its call's result.

        Raises EngineStateError where that call failed, ParallelError where a rank is lost.
        """
        for message in self.leader.messages():
            if isinstance(message, Ended):
                if message.error:
                    raise EngineStateError(f"rank 0's call failed: {message.error}")
                return message.result
            with self.all_or_none("in the middle of what all ranks run"):
                run(message)
                self.tensor.count_call()
        raise AssertionError("a lead ends with Ended")

    def close(self, reason: str = CLOSED) -> None:
        """Leave all groups; see `RankGroup.close`."""
        for group in (self.tensor, self.rows, self.all, self.leader):
            group.close(reason)


class _AllOrNone(AbstractContextManager[None]):
    __slots__ = ("_raised_by_all", "_ranks", "_when")

    def __init__(
        self, ranks: ModelRanks, when: str, raised_by_all: type[BaseException] | tuple[()]
    ) -> None:
        self._ranks = ranks
        self._when = when
        self._raised_by_all = raised_by_all

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, self._raised_by_all):
            self._ranks.close(f"it failed {self._when}: {error!r}")


ONE_RANK = ModelRanks(all=SingleRank())


_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def host_store() -> TCPStore:
    """A store for ranks of this machine, at a port that the system chooses. It lives as long as
    the object."""
    listener = socket.create_server(("127.0.0.1", 0))  # a store's own would be open to all
    return TCPStore(
        "127.0.0.1", listener.getsockname()[1], is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def launch_variables(rank: int, size: int, port: int, local_rank: int) -> dict[str, str]:
    """The environment of a rank that is launched on this machine.

    ``port``: of the `host_store` there. ``local_rank``: the index of its GPU, among those it sees.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already, also of rank 0
    }


def local_rank(config: ParallelConfig) -> int | None:
    """This process's rank on its host, by torchrun's LOCAL_RANK; None: it is the only rank."""
    return None if config.size == 1 else int(os.environ.get("LOCAL_RANK", "0"))


def is_launched() -> bool:
    """Whether a launcher of several processes has started this one."""
    return all(os.environ.get(name) for name in _VARIABLES)


def rank_of(config: ParallelConfig) -> int:
    """This process's rank by its launcher's environment; 0 without one."""
    return int(os.environ["RANK"]) if config.size > 1 and is_launched() else 0


def follows(config: ParallelConfig) -> bool:
    """Whether this process is one of several ranks that run the same rows, and not the first."""
    tensor = config.size if config.mode is ParallelMode.tensor else config.tensor_size
    return rank_of(config) % tensor > 0


_PATIENCE = 30 * 86_400.0
"""Seconds that a rank waits for its leader, which may wait for its users."""


def open_ranks(config: ParallelConfig, device: torch.device) -> ModelRanks:
    """Connect to the other ranks, if any, by torchrun's variables.

    These are RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where more processes were launched than
    ``config.size``, each so many that follow one another are the ranks of one model.

    Raises InvalidInputError if the launched processes do not make whole groups, ParallelError if
    ranks do not come in time.
    """
    if config.size == 1:
        return ONE_RANK
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing or int(os.environ["WORLD_SIZE"]) % config.size:
        found = f"{', '.join(missing)} not set" if missing else os.environ["WORLD_SIZE"]
        raise InvalidInputError(
            "parallel.size", config.size,
            f"needs as many processes, or a multiple, but the environment has WORLD_SIZE: {found}; "
            f"start it with torchrun --nproc-per-node {config.size}",
        )  # fmt: skip
    process, num_processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model, rank = divmod(process, config.size)

    def meet() -> tuple[Store, int]:
        timeout = timedelta(seconds=config.timeout)
        store, _, _ = next(iter(rendezvous("env://", process, num_processes, timeout=timeout)))
        # A process counts its groups, so that each has its own keys in the store.
        return store, store.add(f"specrollout/opened/{process}", 1)

    try:
        store, number = answered(meet, config.timeout)
    except (RuntimeError, TimeoutError) as error:
        raise ParallelError(
            f"rank {rank} of {config.size}: the store at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} cannot be reached ({str(error).splitlines()[0]})"
        ) from error

    opened: list[ProcessRanks] = []

    def give_up(reason: str) -> None:
        for group in opened:
            group.abort(reason)

    def group_of(name: str, members: range, *, is_leaders: bool = False) -> RankGroup:
        if len(members) == 1:
            return SingleRank()
        own = members.index(rank)
        group = ProcessRanks(
            PrefixStore(f"specrollout/{model}/{number}/{name}", store),
            own,
            len(members),
            device=torch.device("cpu") if is_leaders else device,
            timeout=_PATIENCE if is_leaders and own else config.timeout,
            lost=give_up,
        )
        opened.append(group)
        return group

    everyone = group_of("all", range(config.size))
    if config.mode is ParallelMode.tensor:
        return ModelRanks.of_tensor(
            everyone, group_of("leader", range(config.size), is_leaders=True)
        )
    if config.tensor_size == 1:
        return ModelRanks.of_rows(everyone)
    first = rank - rank % config.tensor_size
    same_rows = range(first, first + config.tensor_size)
    same_heads = range(rank % config.tensor_size, config.size, config.tensor_size)
    return ModelRanks(
        tensor=group_of(f"tensor/{first}", same_rows),
        rows=group_of(f"rows/{same_heads[0]}", same_heads),
        all=everyone,
        leader=RankLeader(group_of(f"leader/{first}", same_rows, is_leaders=True)),
    )
