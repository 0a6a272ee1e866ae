"""A replica in Ray actors: the cluster's side of it, its actors, and where they are placed."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rollout.cluster.messages import ReplicaFacts, Submission
from rollout.cluster.ray.instance import ProcessResources
from rollout.cluster.replica import ReplicaDiedError
from rollout.cluster.replica_host import ReplicaHost
from rollout.config import EngineConfig
from rollout.engine.worker_factory import WorkerFactory
from rollout.errors import EngineStateError, ParallelError
from rollout.parallel import host_store, launch_variables

_NUM_LINES = 12
_TAIL_BYTES = 1 << 14
_FETCH_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLocation:
    """The process, node and log files of an actor that is alive or has died."""

    pid: int
    node: str  # Ray's id of it
    log_paths: tuple[str, ...]  # on that node, standard error first

    @classmethod
    def of_this_process(cls) -> ActorLocation:
        """The location of the actor that calls this."""
        paths = []
        for number in (2, 1):
            with contextlib.suppress(OSError):  # no such folder outside Linux
                path = Path(f"/proc/self/fd/{number}").readlink()
                if path.is_file():
                    paths.append(str(path))
        node = ray.get_runtime_context().get_node_id()
        return cls(pid=os.getpid(), node=node, log_paths=tuple(dict.fromkeys(paths)))


def last_lines(location: ActorLocation | None) -> str:
    """The end of an actor's log, as far as it can be had, read on the node where it lies."""
    if location is None:
        return "it wrote no log"
    lines: list[str] = []
    with contextlib.suppress(RayError, GetTimeoutError):  # its node may be gone too
        if location.node == ray.get_runtime_context().get_node_id():
            lines = _tail(location.log_paths)
        else:
            strategy = NodeAffinitySchedulingStrategy(location.node, soft=False)
            task = ray.remote(_tail).options(num_cpus=0, scheduling_strategy=strategy)
            lines = ray.get(task.remote(location.log_paths), timeout=_FETCH_SECONDS)
    if not lines:
        return "it wrote no log"
    shown = "\n".join(f"    {line}" for line in lines)
    return f"the last lines of {location.log_paths[0]}:\n{shown}"


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


@dataclass(slots=True, eq=False)
class RayRank:
    """One process of a replica: the only one, or a rank of its model."""

    replica: RayReplica
    rank: int
    actor: Any
    location: ActorLocation | None = None  # once it is known

    def heartbeat(self) -> Future[float]:
        """Seconds that its engine's step or call under way has taken; 0.0 while nothing is."""
        return self.actor.heartbeat.remote().future()

    def named(self, reason: str) -> str:
        """``reason``, which is this process's, with its rank where there are several."""
        size = len(self.replica.ranks)
        return reason if size == 1 else f"rank {self.rank} of {size}: {reason}"


class RayReplica:
    """See `rollout.cluster.replica.Replica`. Rank 0 is called; it tells the others."""

    def __init__(self, name: str, actors: ActorGroup) -> None:
        self.name = name
        self.ranks = [RayRank(self, rank, actor) for rank, actor in enumerate(actors.actors)]
        self.actor = self.ranks[0].actor
        self.unavailable_reason = ""
        self._actors = actors
        # Threads that bring weights call too, and answers come on Ray's.
        self._lock = threading.Lock()
        self._next_turn = 0
        self._answered = -1  # the latest turn that `unavailable_reason` is of

    def submit(self, submissions: Sequence[Submission]) -> None:
        self._send(self.actor.submit, list(submissions))

    def abort(self, request_ids: Sequence[int]) -> None:
        self._send(self.actor.abort, list(request_ids))

    def sync(self, serial: int) -> None:
        self._send(self.actor.sync, serial)

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        result: Future[Any] = Future()

        def resolve(answered: Future[Any]) -> None:  # on a thread of Ray's
            error = answered.exception()
            if error is not None:
                # An error of the call itself is in its answer: these are of a loop that is broken.
                broken = isinstance(cause_of(error), ParallelError | EngineStateError)
                lost = broken or isinstance(error, RayActorError)
                result.set_exception(ReplicaDiedError(str(error)) if lost else cause_of(error))
                return
            answer = answered.result()
            with self._lock:  # large answers may be overtaken by later ones
                if turn > self._answered:
                    self._answered, self.unavailable_reason = turn, answer.unavailable_reason
            if answer.error is not None:
                result.set_exception(answer.error)
            else:
                result.set_result(answer.value)

        turn, reference = self._send(self.actor.call, method, *args, **kwargs)
        reference.future().add_done_callback(resolve)
        return result

    def kill(self) -> None:
        """End all processes: at once if they can, otherwise within seconds. Calls fail at once."""
        self._actors.kill()

    def _send(self, method: Any, *args: Any, **kwargs: Any) -> tuple[int, Any]:
        """Send a call; returns its turn and Ray's reference. A call that cannot be sent takes no
        turn, for the replica waits for each.

        Raises what pickling the arguments does.
        """
        with self._lock:
            turn = self._next_turn
            reference = method.remote(turn, *args, **kwargs)
            self._next_turn += 1
        return turn, reference


def import_failure(error: BaseException) -> str | None:
    """The module that could not be imported where the replica was to start; None for other
    failures.

    Ray says it in words alone of an actor, or of an argument, that cannot be unpickled there.
    """
    if isinstance(error, ImportError):
        return str(error)
    said = re.search(r"\b(?:ModuleNotFoundError|ImportError): (.+)", str(error))
    return None if said is None else said[1]


def cause_of(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error


class ReplicaActor(ReplicaHost):
    """The replica's side, in a process of Ray's; of several ranks, the side of each."""

    async def location(self) -> ActorLocation:
        """The location of this actor. Can be asked before it has an engine."""
        return ActorLocation.of_this_process()

    async def host_store(self) -> int:
        """The port of a store where ranks on this machine meet. It lives as long as this actor."""
        self._store = host_store()
        return self._store.port

    async def open_rank(
        self,
        rank: int,
        port: int,
        config: EngineConfig,
        factory: WorkerFactory,
        report_seconds: float,
    ) -> ReplicaFacts | None:
        """Be one of several ranks: rank 0 is opened, the others follow it to its end.

        ``port``: of rank 0's `host_store`.
        """
        gpu = 0 if ray.get_gpu_ids() else rank  # it sees no others than its own
        os.environ.update(launch_variables(rank, config.parallel.size, port, gpu))
        if rank == 0:
            return await self.open(config, factory, report_seconds)
        await self.follow(config, factory)
        return None
