"""A replica's host as a Ray actor."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import ray

from rollout.cluster.host import ReplicaHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """Where an actor lives."""

    pid: int
    node: str  # Ray's id of it
    log_paths: tuple[str, ...]  # on that node


class ReplicaActor(ReplicaHost):
    async def residence(self) -> Residence:
        return Residence(
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            log_paths=_log_paths(),
        )


def _log_paths() -> tuple[str, ...]:
    """The files that standard output and error go to."""
    paths = []
    for number in (2, 1):
        with contextlib.suppress(OSError):
            path = Path(f"/proc/self/fd/{number}").readlink()
            if path.is_file():
                paths.append(str(path))
    return tuple(dict.fromkeys(paths))
