"""A replica in a Ray actor: the cluster's side of it, and the actor."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rollout.cluster.host import ReplicaHost
from rollout.cluster.messages import Submission
from rollout.cluster.ray.actor_logs import ActorLocation
from rollout.cluster.replica import ReplicaDiedError


class RayReplica:
    """See `rollout.cluster.replica.Replica`."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.unavailable_reason = ""
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

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        result: Future[Any] = Future()

        def resolve(answered: Future[Any]) -> None:  # on a thread of Ray's
            error = answered.exception()
            if error is not None:
                lost = isinstance(error, RayActorError)
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

    def pulse(self) -> Future[float]:
        """See `Heartbeats`."""
        return self.actor.pulse.remote().future()

    def kill(self) -> None:
        """Its calls fail at once; a process that does not end itself is ended within seconds."""
        ray.kill(self.actor, no_restart=True)

    def _send(self, method: Any, *args: Any, **kwargs: Any) -> tuple[int, Any]:
        """Its turn, which is taken only by what could be sent: the replica waits for each.

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
    """The exception raised in the actor, else ``error``."""
    return error.cause if isinstance(error, RayTaskError) else error


class ReplicaActor(ReplicaHost):
    async def residence(self) -> ActorLocation:
        return ActorLocation.of_this_process()
