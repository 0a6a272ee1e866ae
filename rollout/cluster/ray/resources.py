"""What each replica is given of the cluster's processors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout.cluster.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class ReplicaResources:
    num_cpus: int
    num_gpus: float


def replica_resources(
    config: ClusterConfig, device: str, there: Mapping[str, float]
) -> ReplicaResources:
    """``there``: the whole cluster's, as Ray counts them; ``device``: where the model goes."""
    num_cpus = config.num_cpus or max(1, int(there.get("CPU", 1)) // config.replicas)
    if config.num_gpus is not None:
        return ReplicaResources(num_cpus, config.num_gpus)
    wants_gpu = device.startswith("cuda") or (
        device == "auto" and there.get("GPU", 0) >= config.replicas
    )
    return ReplicaResources(num_cpus, 1.0 if wants_gpu else 0.0)
