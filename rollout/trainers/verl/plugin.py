"""Makes ``actor_rollout_ref.rollout.name=specrollout`` known to verl.

verl imports this through the entry-point group ``verl.plugins`` and drops whatever goes wrong on
the way, so it is logged here first.
"""

from __future__ import annotations

import logging

from rollout.trainers.verl.options import NAME


def _register() -> None:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[(NAME, "async")] = "rollout.trainers.verl.adapter.ServerAdapter"
    RolloutReplicaRegistry.register(NAME, _replica_class)


def _replica_class() -> type:
    from rollout.trainers.verl.metrics import log_with_trainer
    from rollout.trainers.verl.replica import SpecrolloutReplica

    log_with_trainer()
    return SpecrolloutReplica


try:
    _register()
except Exception:
    logging.getLogger(__name__).exception(
        "verl cannot use specrollout: its plugin does not load. docs/verl.md says what to install"
    )
    raise
