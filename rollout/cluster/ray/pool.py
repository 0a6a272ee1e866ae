"""Starts replicas as Ray actors, watches them and replaces those that die."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rollout.cluster.config import ClusterConfig
from rollout.cluster.messages import Submission
from rollout.cluster.ray.actor import ReplicaActor
from rollout.cluster.ray.instance import RayInstance
from rollout.cluster.ray.resources import replica_resources
from rollout.cluster.replica import Died, Event, Opened, ReplicaDiedError, Reported
from rollout.config import EngineConfig
from rollout.errors import ClusterError, RolloutError
from rollout.specs import WorkerFactory

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0


class RayReplica:
    """One actor."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self._turn = 0

    def submit(self, submissions: Sequence[Submission]) -> None:
        self.actor.submit.remote(self._next_turn(), list(submissions))

    def abort(self, request_ids: Sequence[int]) -> None:
        self.actor.abort.remote(self._next_turn(), list(request_ids))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        reference = self.actor.call.remote(self._next_turn(), method, *args, **kwargs)
        reference.future().add_done_callback(partial(_settle, answer))
        return answer

    def kill(self) -> None:
        ray.kill(self.actor, no_restart=True)

    def _next_turn(self) -> int:
        turn, self._turn = self._turn, self._turn + 1
        return turn


@dataclass(slots=True)
class _Seat:
    """A replica's place, whoever lives in it."""

    replica: RayReplica
    is_open: bool = False
    deaths: int = 0  # one after the other, without a rollout in between


class RayPool:
    """See `rollout.cluster.replica.Pool`."""

    def __init__(self, config: EngineConfig, factory: WorkerFactory, cluster: ClusterConfig):
        self._cluster = cluster
        self._factory = factory
        self._instance = RayInstance(cluster)
        self._resources = replica_resources(cluster, config.model.device, self._instance.resources)
        self._config = replace(config, num_threads=config.num_threads or self._resources.num_cpus)
        # What Ray's own threads learned; taken from by `events`.
        self._news: queue.SimpleQueue[tuple[RayReplica, Any, BaseException | None]] = (
            queue.SimpleQueue()
        )
        self._has_opened = False
        self._seats: dict[str, _Seat] = {}
        for index in range(cluster.replicas):
            name = f"replica-{index}"
            self._seats[name] = _Seat(self._start(name))

    @property
    def names(self) -> list[str]:
        return list(self._seats)

    def events(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        deadline = time.monotonic() + timeout
        while not events:
            try:
                wait = max(0.0, deadline - time.monotonic())
                news = [self._news.get(timeout=wait) if wait else self._news.get_nowait()]
            except queue.Empty:
                break
            news += [self._news.get_nowait() for _ in range(self._news.qsize())]
            for replica, value, error in news:
                if self._seats[replica.name].replica is replica:
                    events.append(self._event(replica, value, error))
        return events

    def close(self) -> None:
        seats, self._seats = self._seats, {}
        closing = [seat.replica.actor.close.remote() for seat in seats.values()]
        ray.wait(closing, num_returns=max(1, len(closing)), timeout=_CLOSE_SECONDS)
        for seat in seats.values():
            seat.replica.kill()
        self._instance.close()

    def _start(self, name: str) -> RayReplica:
        resources = self._resources
        actor_class = ray.remote(ReplicaActor).options(
            num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, max_restarts=0
        )
        replica = RayReplica(name, actor_class.remote())
        self._expect(
            replica,
            replica.actor.open.remote(self._config, self._factory, self._cluster.report_seconds),
        )
        return replica

    def _expect(self, replica: RayReplica, reference: Any) -> None:
        def learn(future: Future[Any]) -> None:
            error = future.exception()
            self._news.put((replica, None if error else future.result(), error))

        reference.future().add_done_callback(learn)

    def _event(self, replica: RayReplica, value: Any, error: BaseException | None) -> Event:
        seat = self._seats[replica.name]
        if error is not None:
            return self._died(seat, error)
        self._expect(replica, replica.actor.report.remote())
        if not seat.is_open:
            seat.is_open = self._has_opened = True
            return Opened(replica, value)
        if value.ended:
            seat.deaths = 0
        return Reported(replica, value)

    def _died(self, seat: _Seat, error: BaseException) -> Died:
        dead = seat.replica
        cause = _cause(error)
        if isinstance(cause, RolloutError) and not self._has_opened:
            raise cause
        reason = str(cause).strip()
        dead.kill()
        seat.deaths += 1
        if seat.deaths >= self._cluster.max_deaths:
            raise ClusterError(f"{dead.name} died {seat.deaths} times without a rollout: {reason}")
        log.warning("%s died and is started anew: %s", dead.name, reason)
        seat.replica, seat.is_open = self._start(dead.name), False
        return Died(dead, reason)


def _settle(answer: Future[Any], future: Future[Any]) -> None:
    error = future.exception()
    if error is None:
        answer.set_result(future.result())
    elif isinstance(error, RayActorError):
        answer.set_exception(ReplicaDiedError(str(error)))
    else:
        answer.set_exception(_cause(error))


def _cause(error: BaseException) -> BaseException:
    """What was raised over there."""
    return error.cause if isinstance(error, RayTaskError) else error
