"""Replicas on threads of this process, which die when a test says so: all of a cluster but Ray."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.messages import Submission
from rollout.cluster.replica import Died, Event, Opened, ReplicaDiedError, Reported
from rollout.cluster.replica_host import ReplicaHost
from rollout.config import EngineConfig
from rollout.engine.worker_factory import WorkerFactory
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.held_engine import held

REPORT_SECONDS = 0.002

OnSubmit = Callable[["ThreadReplica", Sequence[Submission]], None]


class ThreadReplica:
    def __init__(self, name: str, pool: ThreadPool) -> None:
        self.name = name
        self.host = ReplicaHost()
        self.is_dead = False
        self.unavailable_reason = ""
        self._pool = pool
        self._turns = itertools.count()
        self._answers: list[Future[Any]] = []

    def submit(self, submissions: Sequence[Submission]) -> None:
        if self._pool.on_submit is not None:
            self._pool.on_submit(self, submissions)
        self._send(self.host.submit, list(submissions))

    def abort(self, request_ids: Sequence[int]) -> None:
        self._send(self.host.abort, list(request_ids))

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.is_dead:
            answer.set_exception(ReplicaDiedError(self.name))
            return answer
        self._answers.append(answer)

        def settle(done: Future[Any]) -> None:
            if answer.done():
                return
            error = done.exception() or done.result().error
            if done.exception() is None:
                self.unavailable_reason = done.result().unavailable_reason
            answer.set_exception(error) if error else answer.set_result(done.result().value)

        self._send(self.host.call, method, *args, **kwargs).add_done_callback(settle)
        return answer

    def sync(self, serial: int) -> None:
        self._send(self.host.sync, serial)

    def kill(self) -> None:
        """Like SIGKILL: nothing more is heard of it."""
        if not self.is_dead:
            self.is_dead = True
            for answer in self._answers:
                if not answer.done():
                    answer.set_exception(ReplicaDiedError(self.name))
            self._pool.news.put((self, None, ReplicaDiedError("killed by the test")))
            self._pool.run(self.host.close())

    def _send(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        turn = next(self._turns)
        return self._pool.run(method(turn, *args, **kwargs))


class ThreadPool:
    """See `rollout.cluster.replica.ReplicaPool`."""

    def __init__(
        self,
        config: EngineConfig,
        factory: WorkerFactory,
        names: Sequence[str],
        on_submit: OnSubmit | None = None,
    ) -> None:
        self.names = list(names)
        self.on_submit = on_submit
        self.news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.lives: list[ThreadReplica] = []
        self._config, self._factory = config, factory
        self._events = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._events.run_forever, daemon=True)
        self._thread.start()
        self._open: set[ThreadReplica] = set()
        self.living = {name: self._start(name) for name in names}

    def run(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._events)

    def events(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        deadline = time.monotonic() + timeout
        while not events:
            try:
                replica, value, error = self.news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if self.living.get(replica.name) is not replica:
                continue
            if error is not None:
                replica.kill()
                self.living[replica.name] = self._start(replica.name)
                events.append(Died(replica, str(error)))
            elif replica.is_dead:
                continue
            elif replica not in self._open:
                self._open.add(replica)
                events.append(Opened(replica, value))
                self._expect(replica, replica.host.report())
            else:
                events.append(Reported(replica, value))
                self._expect(replica, replica.host.report())
        return events

    @contextmanager
    def held(self, *, after: int = 3) -> Iterator[None]:
        """Make every replica wait for a call before each step, once it has made ``after`` more."""
        with ExitStack() as holding:
            for replica in self.living.values():
                assert replica.host._loop is not None, "it has not opened"
                holding.enter_context(held(replica.host._loop, after=after))
            yield

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        self.run(self._close()).result(HANG_SECONDS)
        self._events.call_soon_threadsafe(self._events.stop)
        self._thread.join(HANG_SECONDS)

    async def _close(self) -> None:
        for replica in self.living.values():
            if not replica.is_dead:  # else `kill` has closed it, though nobody has heard of it yet
                await replica.host.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def _start(self, name: str) -> ThreadReplica:
        replica = ThreadReplica(name, self)
        self.lives.append(replica)
        self._expect(replica, replica.host.open(self._config, self._factory, REPORT_SECONDS))
        return replica

    def _expect(self, replica: ThreadReplica, coroutine: Any) -> None:
        def learn(future: Future[Any]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            self.news.put((replica, None if error else future.result(), error))

        self.run(coroutine).add_done_callback(learn)


def kill(cluster: RolloutCluster, pool: ThreadPool, name: str) -> None:
    dead = pool.living[name]
    dead.kill()
    cluster.replicas.wait_until_gone(dead)


def intercept(
    replica: ThreadReplica, method: str, act: Callable[[list[Any], dict[str, Any]], object]
) -> None:
    """``act(args, kwargs)``, which may change both, comes before each call of ``method`` on the
    replica; an error that it returns is the call's."""
    call = replica.call

    def acted(called: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        given = list(args)
        if called.__name__ == method and isinstance(error := act(given, kwargs), Exception):
            answer: Future[Any] = Future()
            answer.set_exception(error)
            return answer
        return call(called, *given, **kwargs)

    replica.call = acted  # type: ignore[method-assign]
