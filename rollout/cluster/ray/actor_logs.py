"""The last lines that a dead actor wrote."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_NUM_LINES = 12
_TAIL_BYTES = 1 << 14
_FETCH_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLocation:
    """Where an actor lives, or lived."""

    pid: int
    node: str  # Ray's id of it
    log_paths: tuple[str, ...]  # on that node, standard error first

    @classmethod
    def of_this_process(cls) -> ActorLocation:
        paths = []
        for number in (2, 1):
            with contextlib.suppress(OSError):  # no such folder outside Linux
                path = Path(f"/proc/self/fd/{number}").readlink()
                if path.is_file():
                    paths.append(str(path))
        node = ray.get_runtime_context().get_node_id()
        return cls(pid=os.getpid(), node=node, log_paths=tuple(dict.fromkeys(paths)))


def last_lines(residence: ActorLocation | None) -> str:
    """The end of its log, as far as it can be had; reads it where it is."""
    if residence is None:
        return "it wrote no log"
    lines: list[str] = []
    with contextlib.suppress(RayError, GetTimeoutError):  # its node may be gone too
        if residence.node == ray.get_runtime_context().get_node_id():
            lines = _tail(residence.log_paths)
        else:
            strategy = NodeAffinitySchedulingStrategy(residence.node, soft=False)
            task = ray.remote(_tail).options(num_cpus=0, scheduling_strategy=strategy)
            lines = ray.get(task.remote(residence.log_paths), timeout=_FETCH_SECONDS)
    if not lines:
        return "it wrote no log"
    shown = "\n".join(f"    {line}" for line in lines)
    return f"the last lines of {residence.log_paths[0]}:\n{shown}"


def _tail(paths: Sequence[str]) -> list[str]:
    """The last lines of the first file that has lines other than Ray's own marks
    (``:actor_name:...``)."""
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
            lines = [line for line in text.splitlines() if line and not line.startswith(":")]
            if lines:
                return list(deque(lines, _NUM_LINES))
    return []
