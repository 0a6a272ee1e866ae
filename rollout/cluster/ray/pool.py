"""Starts replicas as Ray actors, watches them and replaces those that die."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from rollout.cluster.config import ClusterConfig
from rollout.cluster.ray.heartbeats import Heartbeats, Pulsed
from rollout.cluster.ray.instance import RayInstance, ReplicaResources, replica_resources
from rollout.cluster.ray.replica import (
    ActorLocation,
    RayReplica,
    ReplicaActor,
    cause_of,
    import_failure,
    last_lines,
)
from rollout.cluster.replica import Died, Event, Opened, ReplicaDiedError, Reported
from rollout.config import EngineConfig
from rollout.engine.worker import WorkerFactory
from rollout.errors import ClusterError, RolloutError
from rollout.memory.sizing import kv_fraction

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class _NamedReplica:
    """The replica of one name, whichever actor it is now."""

    replica: RayReplica
    is_open: bool = False
    started: float = field(default_factory=time.monotonic)
    location: ActorLocation | None = None
    deaths: int = 0  # one after the other, without a rollout in between

    @property
    def is_first_start(self) -> bool:
        return not (self.is_open or self.deaths)


class RayPool:
    """See `rollout.cluster.replica.ReplicaPool`.

    One answer of each actor is always awaited: its location, then `ReplicaActor.open`'s, then a
    report's. An error in its place is the actor's death. One that answers nothing any more is
    killed, wherever the cluster waits meanwhile.
    """

    def __init__(
        self, config: EngineConfig, factory: WorkerFactory, cluster: ClusterConfig
    ) -> None:
        """Raises InvalidInputError where ``cluster.address`` leads nowhere."""
        self._cluster = cluster
        self._names = f"specrollout-{uuid.uuid4().hex[:8]}"  # of its actors, in Ray's namespace
        self._lives = itertools.count()
        self._instance = RayInstance(cluster)
        self._resources = replica_resources(
            cluster, config.model.device, self._instance.resources, self._instance.num_nodes
        )
        try:  # once, so that what cannot be pickled shows now
            self._settings = [
                ray.put(_config_of_each(config, self._resources)),
                ray.put(factory),
                cluster.report_seconds,
            ]
        except BaseException:
            self._instance.close()
            raise
        # Filled on Ray's threads, emptied by `events`.
        self._answers: queue.SimpleQueue[tuple[RayReplica, Any, BaseException | None]] = (
            queue.SimpleQueue()
        )
        # Ray's own thread, on which answers come, must not ask for more.
        self._opener = ThreadPoolExecutor(1, "opener")
        self._heartbeats = Heartbeats(
            cluster.heartbeat_seconds, cluster.stall_seconds, self._end_hung
        )
        self._has_opened = False  # any of them, ever
        self._failure: RolloutError | None = None
        self._named: dict[str, _NamedReplica] = {}
        log.info(
            "starting %d replicas, each with %d CPUs and %g GPUs",
            cluster.replicas, self._resources.num_cpus, self._resources.num_gpus,
        )  # fmt: skip
        for index in range(cluster.replicas):
            name = f"replica-{index}"
            self._named[name] = _NamedReplica(self._start(name))

    @property
    def names(self) -> list[str]:
        return list(self._named)

    def events(self, timeout: float) -> list[Event]:
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + timeout
        events: list[Event] = []
        while not events and self._failure is None:
            try:
                answers = [self._answers.get(timeout=max(0.0, deadline - time.monotonic()))]
            except queue.Empty:
                break
            answers += [self._answers.get_nowait() for _ in range(self._answers.qsize())]
            for replica, value, error in answers:
                events += self._events_of(replica, value, error)
        if not events:  # all answers are known: nobody may have asked for long
            self._give_up_on_late_starts()
        if not events and self._failure is not None:  # else those first: there are rollouts in them
            raise self._failure
        return events

    def share(self, value: Any) -> Any:
        return ray.put(value)

    def close(self) -> None:
        named, self._named = self._named, {}
        self._heartbeats.close()
        self._opener.shutdown(cancel_futures=True)
        try:
            closing = [each.replica.actor.close.remote() for each in named.values()]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
            for each in named.values():
                each.replica.kill()
        finally:
            self._instance.close()

    def _start(self, name: str) -> RayReplica:
        resources = self._resources
        actor = (
            ray.remote(ReplicaActor)
            .options(
                name=f"{self._names}-{name}-{next(self._lives)}",
                num_cpus=resources.num_cpus,
                num_gpus=resources.num_gpus,
                max_restarts=0,
                scheduling_strategy="SPREAD",
            )
            .remote()
        )
        replica = RayReplica(name, actor)
        self._await(replica, actor.location.remote())
        return replica

    def _open(self, replica: RayReplica) -> None:
        """Make the replica's engine. Its logs are known by now, so a failure can be explained by
        them."""
        self._await(replica, replica.actor.open.remote(*self._settings))

    def _end_hung(self, replica: Pulsed, reason: str) -> None:
        """Kill a replica that hangs. Called on the heartbeats' thread."""
        assert isinstance(replica, RayReplica)
        self._answers.put((replica, None, ReplicaDiedError(reason)))  # before Ray's: it says more
        replica.kill()

    def _await(self, replica: RayReplica, reference: Any) -> None:
        def note(answered: Future[Any]) -> None:
            error = answered.exception()
            value = None if error is not None else answered.result()
            self._answers.put((replica, value, error))
            if isinstance(value, ActorLocation):
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._opener.submit(self._open, replica)

        reference.future().add_done_callback(note)

    def _events_of(
        self, replica: RayReplica, value: Any, error: BaseException | None
    ) -> list[Event]:
        named = self._named[replica.name]
        if named.replica is not replica:
            return []  # of one that was buried
        if error is not None:
            return self._replace(named, cause_of(error))
        if isinstance(value, ActorLocation):
            named.location = value
            return []
        self._await(replica, replica.actor.report.remote())
        if not named.is_open:
            named.is_open = self._has_opened = True
            self._heartbeats.watch(replica)
            return [Opened(replica, value)]
        if value.ended:
            named.deaths = 0
        return [Reported(replica, value)]

    def _replace(self, named: _NamedReplica, error: BaseException) -> list[Event]:
        if isinstance(error, RolloutError) and not self._has_opened:
            self._failure = error  # the model's fault or the configuration's: no use in more
            return []
        dead, reason = named.replica, str(error).strip()
        if named.is_first_start and (lacking := import_failure(error)) is not None:
            self._failure = ClusterError(
                f"{dead.name} cannot start, its environment lacks what it imports: {lacking}. "
                "Install it for all of Ray's workers"
            )
            return []
        dead.kill()
        self._heartbeats.forget(dead)
        named.deaths += 1
        if named.deaths >= self._cluster.max_deaths:
            self._failure = ClusterError(
                f"{dead.name} died {named.deaths} times (cluster.max_deaths) without a rollout in "
                f"between: {reason}\n{last_lines(named.location)}"
            )
        else:
            log.warning("%s died and is started anew: %s", dead.name, reason.split("\n")[0])
            self._named[dead.name] = _NamedReplica(self._start(dead.name), deaths=named.deaths)
        return [Died(dead, reason)]

    def _give_up_on_late_starts(self) -> None:
        """A replacement may find no room where a machine is lost: then the others go on alone."""
        limit = self._cluster.start_seconds
        for name, named in self._named.items():
            if named.is_open or time.monotonic() - named.started <= limit:
                continue
            needs = f"{self._resources.num_cpus} CPUs and {self._resources.num_gpus:g} GPUs"
            reason = (
                f"{name} has not started after {limit:g} s (cluster.start_seconds). It needs "
                f"{needs}; free in Ray are {ray.available_resources()}.\n"
                f"{last_lines(named.location)}"
            )
            if not named.deaths or not any(each.is_open for each in self._named.values()):
                self._failure = ClusterError(reason)
                return
            log.warning("the others go on without: %s", reason)
            named.started = time.monotonic()


def _config_of_each(config: EngineConfig, resources: ReplicaResources) -> EngineConfig:
    fraction = kv_fraction(config.memory, "cuda" if resources.num_gpus else "cpu")
    memory = replace(config.memory, kv_fraction=fraction * resources.memory_share)
    return replace(config, memory=memory, num_threads=config.num_threads or resources.num_cpus)
