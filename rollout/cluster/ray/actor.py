"""A replica's host as a Ray actor."""

from __future__ import annotations

from rollout.cluster.host import ReplicaHost
from rollout.cluster.ray.last_words import Residence


class ReplicaActor(ReplicaHost):
    async def residence(self) -> Residence:
        return Residence.of_this_process()
