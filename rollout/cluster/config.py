"""How many engines there are, and where."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rollout.config import ParallelConfig, ParallelMode
from rollout.errors import InvalidInputError


class ClusterKind(enum.StrEnum):
    """The kinds of clusters. Members are lower case because configuration files name members."""

    none = "none"  # one engine, in this process
    ray = "ray"  # replicas, each a Ray actor


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """How many replicas there are, where, and how long they may be silent."""

    kind: ClusterKind = ClusterKind.none
    replicas: int = 1
    num_cpus: int | None = None  # of each replica, and its torch threads; default: an equal share
    num_gpus: float | None = None  # of each; default: one each if the model goes to a GPU
    # Of Ray: local starts one of its own, auto joins the one that runs, host:port and
    # ray://host:port name one. Default: what RAY_ADDRESS names or `ray start` left here, if there
    # is any, else one of its own.
    address: str | None = None
    namespace: str | None = None  # of Ray, for the actors' names; default: one of its own
    start_seconds: float = 600.0  # for a replica to be placed and to read its model
    report_seconds: float = 0.05  # between two messages on requests whose tokens are streamed
    share_corpus: bool = True  # what a replica commits, the others draft from
    share_seconds: float = 0.5  # between two rounds
    # Of tokens that wait in a replica; of more, whole rollouts are left out.
    share_bytes: int = 8 << 20
    # A replica that is silent for so long hangs, and is replaced. It answers beside its engine,
    heartbeat_seconds: float = 60.0
    stall_seconds: float = 1800.0  # one step or call of which may take so long.
    max_deaths: int = 5  # of a replica, one after the other without a rollout: then it gives up
    max_deaths_per_request: int = 3  # under a request, the last while it ran alone: then it fails

    def check_with(self, parallel: ParallelConfig) -> None:
        """Raises InvalidInputError for what a command, which has one source of requests, cannot
        drive."""
        if parallel.mode is ParallelMode.lockstep:
            raise InvalidInputError(
                "parallel.mode", "lockstep",
                "is of ranks that are each given requests of their own, by your own loop: tensor",
            )  # fmt: skip
        if parallel.size > 1 and self.kind is not ClusterKind.none:
            raise InvalidInputError(
                "cluster.kind", self.kind.value, "must be none with parallel=tensor"
            )

    def __post_init__(self) -> None:
        def require(name: str, ok: bool, remedy: str) -> None:
            if not ok:
                raise InvalidInputError(f"cluster.{name}", getattr(self, name), remedy)

        require("replicas", self.replicas >= 1, "must be >= 1")
        require("replicas", self.replicas == 1 or self.kind is not ClusterKind.none,
                "needs cluster=ray; without it there is one")  # fmt: skip
        require("num_cpus", self.num_cpus is None or self.num_cpus >= 1, "must be >= 1")
        require("num_gpus", self.num_gpus is None or self.num_gpus >= 0, "must be >= 0")
        require("start_seconds", self.start_seconds > 0, "must be > 0")
        require("report_seconds", self.report_seconds > 0, "must be > 0")
        require("share_seconds", self.share_seconds > 0, "must be > 0")
        require("share_bytes", self.share_bytes >= 1, "must be >= 1")
        require("heartbeat_seconds", self.heartbeat_seconds > 0, "must be > 0")
        require("stall_seconds", self.stall_seconds > 0, "must be > 0")
        require("max_deaths", self.max_deaths >= 1, "must be >= 1")
        require("max_deaths_per_request", self.max_deaths_per_request >= 1, "must be >= 1")
