"""Configuration of a cluster: the number of engines, and where they run."""

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
    """The number of replicas, where they run, and how long they may be silent."""

    kind: ClusterKind = ClusterKind.none
    replicas: int = 1
    num_cpus: int | None = None  # of each rank's process, and its threads; default: an equal share
    num_gpus: float | None = None  # of each rank's process; default: 1 if the model goes to a GPU
    # Of Ray: local starts one of its own, auto joins the one that runs, host:port and
    # ray://host:port name one. Default: what RAY_ADDRESS names or `ray start` left here, if there
    # is any, else one of its own.
    address: str | None = None
    namespace: str | None = None  # of Ray, for the actors' names; default: one of its own
    start_seconds: float = 600.0  # for a replica to be placed and to read its model
    report_seconds: float = 0.05  # between two messages on requests whose tokens are streamed
    share_corpus: bool = True  # what a replica commits, the others draft from
    share_seconds: float = 0.5  # between two rounds
    # Tokens that wait in a replica to be shared; of more, whole rollouts are left out.
    share_bytes: int = 8 << 20
    heartbeat_seconds: float = 60.0  # a replica that is silent for so long hangs, and is replaced
    stall_seconds: float = 1800.0  # a step or call that takes longer hangs, and its replica too
    # Deaths of one replica in a row, without a rollout between them, after which the cluster fails.
    max_deaths: int = 5
    # Deaths of replicas that ran a request, the last time alone, after which the request fails.
    max_deaths_per_request: int = 3

    def own_ranks(self, parallel: ParallelConfig) -> ParallelConfig:
        """The ranks of the process that makes the engine: of a cluster, its replicas have them."""
        return parallel if self.kind is ClusterKind.none else ParallelConfig()

    def check_with(self, parallel: ParallelConfig) -> None:
        """Raises InvalidInputError for ranks that one source of requests cannot drive, or that
        would share a GPU."""
        if parallel.mode is ParallelMode.lockstep:
            raise InvalidInputError(
                "parallel.mode", "lockstep",
                "is of ranks that are each given requests of their own, by your own loop: tensor",
            )  # fmt: skip
        if parallel.size > 1 and self.num_gpus is not None and 0 < self.num_gpus < 1:
            raise InvalidInputError(
                "cluster.num_gpus", self.num_gpus,
                f"must be 0, or 1 or more with parallel.size={parallel.size}: it is of each rank",
            )  # fmt: skip

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
