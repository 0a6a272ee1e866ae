"""How many engines there are, and where."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rollout.errors import InvalidInputError


class ClusterKind(enum.StrEnum):
    """Members are lower case because configuration files name members."""

    none = "none"  # one engine, in this process
    ray = "ray"  # replicas, each a Ray actor


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    kind: ClusterKind = ClusterKind.none
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InvalidInputError("cluster.replicas", self.replicas, "must be >= 1")
        if self.kind is ClusterKind.none and self.replicas != 1:
            raise InvalidInputError(
                "cluster.replicas", self.replicas, "needs cluster=ray; without it there is one"
            )
