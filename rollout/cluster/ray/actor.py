"""A replica's host as a Ray actor."""

from __future__ import annotations

from rollout.cluster.host import ReplicaHost
from rollout.cluster.ray.actor_logs import ActorLocation


class ReplicaActor(ReplicaHost):
    async def residence(self) -> ActorLocation:
        return ActorLocation.of_this_process()
