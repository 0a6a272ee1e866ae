"""One actor, from the cluster's side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rollout.cluster.messages import Submission
from rollout.cluster.replica import ReplicaDiedError


class RayReplica:
    """See `rollout.cluster.replica.Replica`."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.why_not = ""
        self._turns = itertools.count()  # also taken from by threads that bring weights

    def submit(self, submissions: Sequence[Submission]) -> None:
        self.actor.submit.remote(next(self._turns), list(submissions))

    def abort(self, request_ids: Sequence[int]) -> None:
        self.actor.abort.remote(next(self._turns), list(request_ids))

    def sync(self, serial: int) -> None:
        self.actor.sync.remote(next(self._turns), serial)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        settled: Future[Any] = Future()

        def settle(answered: Future[Any]) -> None:  # on a thread of Ray's
            error = answered.exception()
            if error is not None:
                lost = isinstance(error, RayActorError)
                settled.set_exception(ReplicaDiedError(str(error)) if lost else cause_of(error))
                return
            answer = answered.result()
            self.why_not = answer.why_not
            if answer.error is not None:
                settled.set_exception(answer.error)
            else:
                settled.set_result(answer.value)

        reference = self.actor.call.remote(next(self._turns), method, *args, **kwargs)
        reference.future().add_done_callback(settle)
        return settled

    def kill(self) -> None:
        ray.kill(self.actor, no_restart=True)


def cause_of(error: BaseException) -> BaseException:
    """What was raised in the actor, where it was that; else ``error``."""
    return error.cause if isinstance(error, RayTaskError) else error
