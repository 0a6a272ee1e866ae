"""A replica as the cluster sees it, wherever it runs; and what happens to replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.cluster.messages import ReplicaFacts, Report, Submission


class Replica(Protocol):
    """One life of one replica. What is sent is done in the order it was sent, between two steps.

    Futures get `ReplicaDiedError` when it dies first. After that nothing is done and nothing
    raises.
    """

    @property
    def name(self) -> str:
        """The replica's name, which its replacement inherits."""
        ...

    @property
    def unavailable_reason(self) -> str:
        """Why the engine cannot run a step, as of its last answer; empty when it can."""
        ...

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Queue requests on the replica. Returns at once, like every method here."""
        ...

    def abort(self, request_ids: Sequence[int]) -> None: ...

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of `RolloutEngine` on the engine; the future has its value or its
        exception."""
        ...

    def sync(self, serial: int) -> None:
        """Report at once; that report and later ones carry ``serial``."""
        ...

    def kill(self) -> None: ...


def then(answer: Future[Any], function: Callable[[Future[Any]], object]) -> Future[None]:
    """A future that is done when ``function(answer)`` has returned, and fails with what it raises.

    It is called on the thread that answers come on, so it must be short.
    """
    done: Future[None] = Future()

    def call(answer: Future[Any]) -> None:
        try:
            function(answer)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    answer.add_done_callback(call)
    return done


class ReplicaDiedError(Exception):
    """The replica died before it answered. The cluster hears of the death by itself."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A replica has an engine, and has been given nothing so far."""

    replica: Replica
    facts: ReplicaFacts


@dataclass(frozen=True, slots=True)
class Reported:
    """A replica has sent a report."""

    replica: Replica
    report: Report


@dataclass(frozen=True, slots=True)
class Died:
    """A replica has died: no event of it follows. Another of its name is being started."""

    replica: Replica
    reason: str


Event = Opened | Reported | Died


class ReplicaPool(Protocol):
    """Starts replicas, watches them and replaces those that die."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all configured replicas."""
        ...

    def events(self, timeout: float) -> list[Event]:
        """Events in order; waits at most ``timeout`` seconds for the first.

        Raises ClusterError where starting again is no use, and what made the engine impossible
        (InvalidInputError, CheckpointError, ...) while none has ever opened.
        """
        ...

    def share(self, value: Any) -> Any:
        """A reference to ``value`` as an argument of many calls: it is copied once per host."""
        ...

    def close(self) -> None: ...
