"""What each replica is given of the cluster's processors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rollout.cluster.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    num_cpus: int
    num_gpus: float
    memory_share: float  # of the device it is on, beside other replicas


def replica_resources(
    config: ClusterConfig, device: str, there: Mapping[str, float], num_nodes: int
) -> ReplicaResources:
    """``there``: the whole cluster's, as Ray counts them; ``device``: where the model goes."""
    num_cpus = config.num_cpus or max(1, int(there.get("CPU", 1)) // config.replicas)
    if config.num_gpus is not None:
        num_gpus = config.num_gpus
    else:
        has_gpus = there.get("GPU", 0) >= config.replicas
        num_gpus = float(device.startswith("cuda") or (device == "auto" and has_gpus))
    if num_gpus:
        return ReplicaResources(num_cpus, num_gpus, min(1.0, num_gpus))
    per_node = math.ceil(config.replicas / max(1, num_nodes))  # they are spread
    return ReplicaResources(num_cpus, 0.0, 1 / per_node)
