"""The replicas that are alive, and who among them takes requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.cluster.messages import ReplicaFacts, Report
from rollout.cluster.replica import (
    Died,
    Event,
    Opened,
    Replica,
    ReplicaDiedError,
    ReplicaPool,
    Reported,
)
from rollout.errors import ClusterError

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.01
"""The longest an idle caller waits for news before it looks around."""

_MAX_TRIES = 3

Joiner = Callable[[Replica], "Future[Any] | None"]


class Listener(Protocol):
    """The cluster's side of what happens to replicas, called on the caller's thread inside calls of
    `ReplicaManager`."""

    def joined(self, name: str, facts: ReplicaFacts) -> None:
        """A replica has been brought up to date, and takes requests from now on."""
        ...

    def reported(self, name: str, report: Report) -> None:
        """A replica that has joined has sent a report."""
        ...

    def died(self, name: str, reason: str) -> None:
        """A replica that had joined has died."""
        ...


@dataclass(slots=True)
class _Newcomer:
    replica: Replica
    facts: ReplicaFacts
    answers: list[Future[Any]] = field(default_factory=list)
    is_stale: bool = False  # something changed while it was brought up to date


class ReplicaManager:
    """Takes over a pool. A replica that has opened is brought up to date, then joins."""

    def __init__(self, pool: ReplicaPool, listener: Listener) -> None:
        self._pool = pool
        self._listener = listener
        self._newcomers: dict[str, _Newcomer] = {}
        self._joined: dict[str, Replica] = {}
        self._joiners: list[Joiner] = []
        self._is_closed = False

    @property
    def joined(self) -> Mapping[str, Replica]:
        return self._joined

    @property
    def all_joined(self) -> bool:
        return len(self._joined) == len(self._pool.names)

    def on_join(self, joiner: Joiner) -> None:
        """Call ``joiner(replica)`` for each replica that has opened, before it takes requests.

        What it calls on the replica comes before everything else does. The replica joins when the
        futures of all joiners are done; one that fails is its death. It must not wait.
        """
        self._joiners.append(joiner)

    def repeat_joins(self) -> None:
        """Let joins under way begin again when they are done, for their content has changed."""
        for newcomer in self._newcomers.values():
            newcomer.is_stale = True

    def poll(self, timeout: float) -> None:
        """Handle what has happened; wait at most ``timeout`` seconds for something to happen.

        Raises what `ReplicaPool.events` does.
        """
        for event in self._pool.events(timeout):
            self._handle(event)
        for name, newcomer in list(self._newcomers.items()):
            if all(answer.done() for answer in newcomer.answers):
                self._let_in(name, newcomer)

    def on_all(
        self,
        method: Callable[..., Any],
        *args: Any,
        newcomers: bool = False,
        undo: Callable[[Replica], Future[Any]] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The result of an engine's method on each replica that has joined and lives, by name.

        A replica that joins while a dead one is waited for is called too. ``newcomers``: replicas
        not up to date yet are called too, and are not in the result. When all have answered, raises
        the first error; the replicas that did not fail have then done what ``undo`` calls.
        """
        values: dict[str, Any] = {}
        failures: list[Exception] = []
        called: set[Replica] = set()
        while True:
            for newcomer in self._newcomers.values() if newcomers else ():
                if newcomer.replica not in called:
                    called.add(newcomer.replica)
                    newcomer.answers.append(newcomer.replica.call(method, *args, **kwargs))
            joined = [each for each in self._joined.values() if each not in called]
            if not joined:
                break
            called.update(joined)
            done, failed = self.outcomes(
                {each: each.call(method, *args, **kwargs) for each in joined}
            )
            values |= {replica.name: value for replica, value in done.items()}
            failures += failed.values()
        if failures:
            if undo is not None:
                for newcomer in self._newcomers.values() if newcomers else ():
                    newcomer.answers.append(undo(newcomer.replica))
                willing = [each for name, each in self._joined.items() if name in values]
                for answer in [undo(each) for each in willing]:
                    answer.exception()  # who cannot says so when it is next asked
            raise failures[0]
        return values

    def call_all(
        self, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> dict[Replica, Future[Any]]:
        """Call an engine's method on each replica that has joined, and wait for none."""
        return {each: each.call(method, *args, **kwargs) for each in self._joined.values()}

    def await_one(self) -> None:
        """Wait until a replica has joined. Raises ClusterError once all were ended by `close`."""
        while not self._joined:
            if self._is_closed:
                raise ClusterError("the cluster is closed")
            self.poll(WAIT_SECONDS)

    def on_one(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of an engine's method on one replica; on another, if that one dies meanwhile.

        Raises ClusterError where several die one after the other: the call may be what kills them.
        """
        for _ in range(_MAX_TRIES):
            self.await_one()
            replica = next(iter(self._joined.values()))
            try:
                return replica.call(method, *args, **kwargs).result()
            except ReplicaDiedError:
                self.wait_until_gone(replica)
        raise ClusterError(f"{_MAX_TRIES} replicas died while they ran {method.__name__}")

    def outcomes(
        self, answers: Mapping[Replica, Future[Any]]
    ) -> tuple[dict[Replica, Any], dict[Replica, Exception]]:
        """Values and errors of living replicas, once all have answered and dead ones are gone."""
        done: dict[Replica, Any] = {}
        failed: dict[Replica, Exception] = {}
        for replica, answer in answers.items():
            try:
                done[replica] = answer.result()
            except ReplicaDiedError:
                self.wait_until_gone(replica)
            except Exception as error:
                failed[replica] = error
        return done, failed

    def wait_until_gone(self, replica: Replica) -> None:
        """Wait until the pool has reported a replica's death. What it last said counts no more
        then."""
        while self._joined.get(replica.name) is replica:
            self.poll(WAIT_SECONDS)

    def share(self, value: Any) -> Any:
        return self._pool.share(value)

    def close(self) -> None:
        self._joined = {}
        self._newcomers = {}
        self._is_closed = True
        self._pool.close()

    def _handle(self, event: Event) -> None:
        match event:
            case Opened(replica, facts):
                newcomer = self._newcomers[replica.name] = _Newcomer(replica, facts)
                self._bring_up_to_date(newcomer)
            case Reported(replica, report):
                self._listener.reported(replica.name, report)
            case Died(replica, reason):
                self._newcomers.pop(replica.name, None)
                if self._joined.pop(replica.name, None) is not None:
                    self._listener.died(replica.name, reason)

    def _bring_up_to_date(self, newcomer: _Newcomer) -> None:
        newcomer.is_stale = False
        answers = [joiner(newcomer.replica) for joiner in self._joiners]
        newcomer.answers = [answer for answer in answers if answer is not None]

    def _let_in(self, name: str, newcomer: _Newcomer) -> None:
        for error in (answer.exception() for answer in newcomer.answers):
            if error is not None:
                log.warning("%s cannot join: %s", name, error)
                newcomer.replica.kill()  # its death is heard of as any other
                newcomer.answers = [Future()]  # so that it is not let in until then
                return
        if newcomer.is_stale:
            self._bring_up_to_date(newcomer)
            return
        del self._newcomers[name]
        self._joined[name] = newcomer.replica
        log.info("%s is up: %d of %d replicas", name, len(self._joined), len(self._pool.names))
        self._listener.joined(name, newcomer.facts)
