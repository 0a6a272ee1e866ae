"""Starts replicas as Ray actors, watches them and replaces those that die."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from rollout.cluster.config import ClusterConfig
from rollout.cluster.ray.heartbeats import Heartbeats
from rollout.cluster.ray.instance import ProcessResources, RayInstance, process_resources
from rollout.cluster.ray.replica import (
    ActorGroup,
    ActorLocation,
    RayRank,
    RayReplica,
    ReplicaActor,
    cause_of,
    import_failure,
    last_lines,
)
from rollout.cluster.replica import Died, Event, Opened, ReplicaDiedError, Reported
from rollout.config import EngineConfig
from rollout.engine.worker_factory import WorkerFactory
from rollout.errors import ClusterError, ParallelError, RolloutError
from rollout.memory.sizing import kv_fraction

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
_CAUSE_SECONDS = 20.0
"""Within so long Ray notices a process that died. The ranks that lost it notice at once."""


@dataclass(slots=True)
class _NamedReplica:
    """The replica of one name, whichever actor it is now."""

    replica: RayReplica
    is_open: bool = False
    started: float = field(default_factory=time.monotonic)
    deaths: int = 0  # one after the other, without a rollout in between

    @property
    def is_first_start(self) -> bool:
        return not (self.is_open or self.deaths)


class RayPool:
    """See `rollout.cluster.replica.ReplicaPool`.

    One answer of each actor is always awaited: its location, then `ReplicaActor.open`'s, then a
    report's; of ranks that follow another, that they have ended. An error in its place is the
    replica's death, whose actors all end. An actor that answers nothing any more is killed,
    wherever the cluster waits meanwhile.
    """

    def __init__(
        self, config: EngineConfig, factory: WorkerFactory, cluster: ClusterConfig
    ) -> None:
        """Raises InvalidInputError where ``cluster.address`` leads nowhere."""
        self._cluster = cluster
        self._names = f"specrollout-{uuid.uuid4().hex[:8]}"  # of its actors, in Ray's namespace
        self._lives = itertools.count()
        self._num_ranks = config.parallel.size  # processes of a replica
        self._instance = RayInstance(cluster, self._num_ranks)
        self._resources = process_resources(
            cluster, config.model.device, self._instance.resources, self._instance.num_nodes,
            self._num_ranks,
        )  # fmt: skip
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
        self._answers: queue.SimpleQueue[tuple[RayRank, Any, BaseException | None]] = (
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
        log.info("starting %d replicas, each with %s", cluster.replicas, self._needs)
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
            for rank, value, error in answers:
                events += self._events_of(rank, value, error)
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
            opened = [each.replica for each in named.values() if each.is_open]
            closing = [replica.actor.close.remote() for replica in opened]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
            for each in named.values():
                each.replica.kill()
        finally:
            self._instance.close()

    @property
    def _needs(self) -> str:
        """The resources of a replica."""
        each = f"{self._resources.num_cpus} CPUs and {self._resources.num_gpus:g} GPUs"
        if self._num_ranks == 1:
            return each
        return f"{self._num_ranks} ranks on one machine, of {each} each (parallel.size)"

    def _start(self, name: str) -> RayReplica:
        actor_name = f"{self._names}-{name}-{next(self._lives)}"
        actors = ActorGroup(ReplicaActor, actor_name, self._num_ranks, self._resources)
        replica = RayReplica(name, actors)
        for rank in replica.ranks:
            self._await(rank, rank.actor.location.remote())
        return replica

    def _locate(self, rank: RayRank, location: ActorLocation) -> None:
        """Make the replica's engine once all its logs are known, so that they can explain a
        failure."""
        rank.location = location
        ranks = rank.replica.ranks
        if not all(each.location for each in ranks):
            return
        if len(ranks) == 1:
            self._await(rank, rank.actor.open.remote(*self._settings))
            return
        port = rank.replica.actor.host_store.remote()
        for each in ranks:
            self._await(each, each.actor.open_rank.remote(each.rank, port, *self._settings))

    def _end_hung(self, rank: RayRank, reason: str) -> None:
        """Kill a replica of which a process hangs. Called on the heartbeats' thread."""
        self._answers.put((rank, None, ReplicaDiedError(reason)))  # before Ray's: it says more
        rank.replica.kill()

    def _await(self, rank: RayRank, reference: Any) -> None:
        def note(answered: Future[Any]) -> None:
            error = answered.exception()
            value = None if error is not None else answered.result()
            answer = (rank, value, None if error is None else cause_of(error))
            if isinstance(answer[2], ParallelError):  # another rank's answer says why
                wait = threading.Timer(_CAUSE_SECONDS, self._answers.put, [answer])
                wait.daemon = True
                wait.start()
                return
            self._answers.put(answer)
            if isinstance(value, ActorLocation):
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._opener.submit(self._locate, rank, value)

        reference.future().add_done_callback(note)

    def _events_of(self, rank: RayRank, value: Any, error: BaseException | None) -> list[Event]:
        replica = rank.replica
        named = self._named[replica.name]
        if named.replica is not replica:
            return []  # of one that was buried
        if error is not None:
            return self._replace(named, rank, error)
        if isinstance(value, ActorLocation):
            return []
        if rank.rank:
            return self._replace(named, rank, ReplicaDiedError("it follows rank 0 no more"))
        self._await(rank, rank.actor.report.remote())
        if not named.is_open:
            named.is_open = self._has_opened = True
            for each in replica.ranks:
                self._heartbeats.watch(each)
            return [Opened(replica, value)]
        if value.ended:
            named.deaths = 0
        return [Reported(replica, value)]

    def _replace(self, named: _NamedReplica, rank: RayRank, error: BaseException) -> list[Event]:
        is_lost = isinstance(error, ParallelError)  # which names its rank
        if isinstance(error, RolloutError) and not is_lost and not self._has_opened:
            error.args = (rank.named(str(error)),)
            self._failure = error  # the model's fault or the configuration's: no use in more
            return []
        dead, reason = named.replica, str(error).strip()
        reason = reason if is_lost else rank.named(reason)
        if named.is_first_start and (lacking := import_failure(error)) is not None:
            self._failure = ClusterError(
                f"{dead.name} cannot start, its environment lacks what it imports: {lacking}. "
                "Install it for all of Ray's workers"
            )
            return []
        dead.kill()
        for each in dead.ranks:
            self._heartbeats.forget(each)
        named.deaths += 1
        if named.deaths >= self._cluster.max_deaths:
            self._failure = ClusterError(
                f"{dead.name} died {named.deaths} times (cluster.max_deaths) without a rollout in "
                f"between: {reason}\n{last_lines(rank.location)}"
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
            logs = [rank.named(last_lines(rank.location)) for rank in named.replica.ranks]
            reason = (
                f"{name} has not started after {limit:g} s (cluster.start_seconds). It needs "
                f"{self._needs}; free in Ray are {ray.available_resources()} of "
                f"{ray.cluster_resources()}.\n" + "\n".join(logs)
            )
            if not named.deaths or not any(each.is_open for each in self._named.values()):
                self._failure = ClusterError(reason)
                return
            log.warning("the others go on without: %s", reason)
            named.started = time.monotonic()


def _config_of_each(config: EngineConfig, resources: ProcessResources) -> EngineConfig:
    fraction = kv_fraction(config.memory, "cuda" if resources.num_gpus else "cpu")
    memory = replace(config.memory, kv_fraction=fraction * resources.memory_share)
    return replace(config, memory=memory, num_threads=config.num_threads or resources.num_cpus)
