"""The Ray that the replicas run in: one that is there, or one of our own."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from rollout.cluster.config import ClusterConfig
from rollout.errors import InvalidInputError

log = logging.getLogger(__name__)


class RayInstance:
    """Connected while it lives; `close` ends only what it began."""

    def __init__(self, config: ClusterConfig) -> None:
        """Raises InvalidInputError where ``config.address`` leads nowhere."""
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _connect(config)
        self.resources: dict[str, float] = ray.cluster_resources()
        self.num_nodes = sum(node["Alive"] for node in ray.nodes())

    def close(self) -> None:
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()


def _connect(config: ClusterConfig) -> None:
    wanted = (config.num_cpus or 1) * config.replicas
    options: dict[str, Any] = {
        "namespace": config.namespace,
        "log_to_driver": False,
        "configure_logging": False,
    }
    if config.address is None and not os.environ.get("RAY_ADDRESS"):
        try:
            ray.init("auto", **options)
        except (ConnectionError, RuntimeError):  # none, or one of another version of Ray
            _start(wanted, options)
        else:
            log.warning(
                "joined the Ray that runs here, at %s: cluster.address=local starts another",
                ray.get_runtime_context().gcs_address,
            )
        return
    if config.address == "local":
        _start(wanted, options)
        return
    try:
        ray.init(config.address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InvalidInputError("cluster.address", config.address, f"leads nowhere: {error}") from (
            error
        )


def _start(wanted: int, options: dict[str, Any]) -> None:
    """CPUs are Ray's bookkeeping: replicas that were asked for may share them."""
    num_cpus = max(wanted, os.cpu_count() or 1)
    ray.init("local", num_cpus=num_cpus, include_dashboard=False, **options)
