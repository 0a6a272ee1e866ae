"""The actors of one replica: one, or one for each rank of its model, all on one machine."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.cluster.ray.instance import ProcessResources


class ActorGroup:
    """Actors that are placed together, and end together."""

    def __init__(
        self, actor_class: type, name: str, num_actors: int, resources: ProcessResources
    ) -> None:
        """Ask Ray for the actors. Waits for nothing.

        Several are in a placement group of one machine: ranks exchange data twice in each half of
        a layer. A single one goes where there is most room.
        """
        self._group: PlacementGroup | None = None
        if num_actors > 1:
            share = {"CPU": float(resources.num_cpus), "GPU": resources.num_gpus}
            bundle = {resource: count for resource, count in share.items() if count}
            self._group = placement_group([bundle] * num_actors, strategy="STRICT_PACK", name=name)
        self.actors = [
            ray.remote(actor_class)
            .options(
                name=name if self._group is None else f"{name}-rank-{rank}",
                num_cpus=resources.num_cpus,
                num_gpus=resources.num_gpus,
                max_restarts=0,
                scheduling_strategy=self._strategy(rank),
            )
            .remote()
            for rank in range(num_actors)
        ]

    def kill(self) -> None:
        """End the processes: at once if they can, otherwise within seconds."""
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)

    def _strategy(self, rank: int) -> Any:
        if self._group is None:
            return "SPREAD"
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
