"""The engine that a configuration asks for: one in this process, or replicas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import EngineConfig, engine_config
from rollout.engine.engine import RolloutEngine
from rollout.engine.protocol import Engine
from rollout.engine.spmd import check_ranks
from rollout.engine.worker_factory import WorkerFactory, factory_of, worker_factory
from rollout.errors import InvalidInputError
from rollout.models.checkpoint import Progress


def open_pretrained(
    path: str | os.PathLike[str],
    spec: str = "ngram",
    *,
    spec_options: Mapping[str, Any] | None = None,
    cluster: str = "none",
    cluster_options: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Engine:
    """Open `RolloutEngine.from_pretrained`, or a cluster of such engines.

    Args:
        cluster: ``none`` or ``ray``.
        cluster_options: fields of ClusterConfig: ``{"replicas": 4}``.

    Raises what `open_engine` does.
    """
    factory = worker_factory(spec, **(spec_options or {}))
    return open_with(
        engine_config(os.fspath(path), overrides), factory, _config(cluster, cluster_options)
    )


def open_engine(
    config: EngineConfig,
    spec: Mapping[str, Any],
    cluster: ClusterConfig,
    progress: Progress | None = None,
) -> Engine:
    """Open one engine or a cluster, ready to generate.

    Args:
        spec: ``_target_`` names the function that builds the worker; the other keys are its
            options.
        progress: told how far the model's weights are read, of one engine.

    Raises what `RolloutEngine.from_config` does; of a cluster ClusterError too, and
    InvalidInputError where Ray is not installed, ``cluster.address`` leads nowhere, or
    ``config.parallel`` does not suit the cluster or the model.
    """
    return open_with(config, factory_of(spec), cluster, progress)


def open_with(
    config: EngineConfig,
    factory: WorkerFactory,
    cluster: ClusterConfig,
    progress: Progress | None = None,
) -> Engine:
    """`open_engine` for a worker's factory, which a cluster's replicas unpickle."""
    if cluster.kind is ClusterKind.none:
        return RolloutEngine.from_config(config, factory, progress)
    cluster.check_with(config.parallel)
    check_ranks(config.parallel, config.model)
    try:
        from rollout.cluster.ray.pool import RayPool
    except ImportError as error:
        raise InvalidInputError(
            "cluster.kind", "ray", "needs Ray: pip install 'specrollout[ray]'"
        ) from error
    return RolloutCluster(config, cluster, RayPool(config, factory, cluster))


def _config(kind: str, options: Mapping[str, Any] | None) -> ClusterConfig:
    kinds = [each.value for each in ClusterKind]
    if kind not in kinds:
        raise InvalidInputError("cluster", kind, f"must be one of {', '.join(kinds)}")
    known = [each.name for each in fields(ClusterConfig) if each.name != "kind"]
    for name, value in (options or {}).items():
        if name not in known:
            raise InvalidInputError(
                f"cluster_options[{name!r}]", value, f"unknown; there are {', '.join(known)}"
            )
    return ClusterConfig(kind=ClusterKind(kind), **(options or {}))
