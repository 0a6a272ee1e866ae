"""The Ray cluster that replicas run in, an existing one or our own, and each replica's share."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from rollout.cluster.config import ClusterConfig
from rollout.errors import ClusterError, InvalidInputError


@dataclass(frozen=True, slots=True)
class ProcessResources:
    """The share of a machine that each process is given: a replica's, or a rank's of one."""

    num_cpus: int
    num_gpus: float
    memory_share: float  # of the device it is on, beside other processes


def process_resources(
    config: ClusterConfig,
    device: str,
    there: Mapping[str, float],
    num_nodes: int,
    num_ranks: int,
) -> ProcessResources:
    """The share of a process.

    Args:
        device: where the model runs.
        there: the whole cluster's resources, as Ray counts them.
        num_ranks: processes of a replica.
    """
    processes = config.replicas * num_ranks
    num_cpus = config.num_cpus or max(1, int(there.get("CPU", 1)) // processes)
    if config.num_gpus is not None:
        num_gpus = config.num_gpus
    else:
        # Ranks are wanted for models that no CPU runs: of GPUs that are too few Ray says so.
        has_gpus = there.get("GPU", 0) >= (config.replicas if num_ranks == 1 else 1)
        num_gpus = float(device.startswith("cuda") or (device == "auto" and has_gpus))
    if num_gpus:
        return ProcessResources(num_cpus, num_gpus, min(1.0, num_gpus))
    if num_ranks > 1:  # replicas are packed: all of them may be on one machine
        return ProcessResources(num_cpus, 0.0, 1 / processes)
    per_node = math.ceil(config.replicas / max(1, num_nodes))  # they are spread
    return ProcessResources(num_cpus, 0.0, 1 / per_node)


log = logging.getLogger(__name__)


class RayInstance:
    """A connection to Ray. `close` ends only what this process started."""

    def __init__(self, config: ClusterConfig, num_ranks: int) -> None:
        """Connect, with room for replicas of ``num_ranks`` processes where it starts Ray.

        Raises InvalidInputError where ``config.address`` leads nowhere, ClusterError where Ray
        cannot start.
        """
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            with _own_sigterm():
                _connect(config, (config.num_cpus or 1) * config.replicas * num_ranks)
        self.resources: dict[str, float] = ray.cluster_resources()
        self.num_nodes = sum(node["Alive"] for node in ray.nodes())

    def close(self) -> None:
        """End Ray where it was started here."""
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler: those that Ray puts in its place as it connects end the process
    with a status of their own, or abort it and leave what it has started."""
    former = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or former is None:
        yield
        return
    try:
        yield
    except SystemExit as error:
        signal.signal(signal.SIGTERM, former)
        if error.code == signal.SIGTERM:  # Ray's handler raised it: ours says how to end
            signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, former)


def _started_here() -> str | None:
    """The address that `ray start` left on this machine."""
    try:
        from ray._private.utils import read_ray_address
    except ImportError:  # a later Ray: it moves what is private
        return None
    return read_ray_address()


def _connect(config: ClusterConfig, wanted_cpus: int) -> None:
    options: dict[str, Any] = {
        "namespace": config.namespace,
        "log_to_driver": False,
        "configure_logging": False,
    }
    address = config.address
    if address is None and not os.environ.get("RAY_ADDRESS"):
        # What `ray start` left here. Not "auto": that takes any Ray it finds, also one that another
        # process started for itself and ends before this one is done.
        address = _started_here() or "local"
        if address != "local":
            try:
                ray.init(address, **options)
                log.warning(
                    "joined the Ray that was started here, at %s: cluster.address=local starts "
                    "another", address,
                )  # fmt: skip
                return
            except (ConnectionError, RuntimeError):  # it is gone, or of another version of Ray
                address = "local"
    if address == "local":
        _start(wanted_cpus, options)
        return
    try:
        ray.init(address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InvalidInputError("cluster.address", address, f"leads nowhere: {error}") from error


def _start(wanted: int, options: dict[str, Any]) -> None:
    """Start Ray on this machine, with CPUs for all replicas: they are Ray's bookkeeping, and may be
    shared."""
    num_cpus = max(wanted, os.cpu_count() or 1)
    try:
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, **options)
    except Exception as error:  # also bare ones: "The current node timed out during startup"
        raise ClusterError(
            f"Ray cannot start on this machine: {error}. Start it with `ray start --head`, or name "
            "one that runs in cluster.address"
        ) from error
