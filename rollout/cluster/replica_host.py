"""The replica's side: an engine on a thread of its own, and reports of what it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from rollout.cluster.messages import CallResult, ReplicaFacts, Report, Submission
from rollout.cluster.progress_reporter import ProgressReporter
from rollout.config import EngineConfig
from rollout.engine.engine import RolloutEngine
from rollout.engine.engine_loop import EngineLoop
from rollout.engine.spmd import follow, open_leading
from rollout.engine.worker_factory import WorkerFactory
from rollout.errors import EngineStateError, ParallelError
from rollout.parallel.time_limit import on_thread


class ReplicaHost:
    """A replica's engine on a thread, called from one event loop. Calls that must begin in the
    order they were made are numbered from 0, since they may arrive in another.

    Of several ranks rank 0 is called, and the others `follow` it.
    """

    def __init__(self) -> None:
        self._turns = _Turns()
        self._loop: EngineLoop[RolloutEngine] | None = None

    async def open(
        self, config: EngineConfig, factory: WorkerFactory, report_seconds: float
    ) -> ReplicaFacts:
        """Make the engine. Raises what `RolloutEngine.from_config` does."""
        opened = partial(RolloutEngine.from_config, config, factory)
        engine = await asyncio.to_thread(open_leading, config.parallel, opened, ExitStack())
        self._loop = EngineLoop(engine)
        self._reporter = ProgressReporter(self._loop, report_seconds, asyncio.get_running_loop())
        return ReplicaFacts(
            vocab_size=engine.vocab_size,
            limits=engine.limits,
            max_context_len=engine.max_context_len,
            max_sequence_len=engine.max_sequence_len,
            eos_token_ids=engine.eos_token_ids,
            records_routes=engine.records_routes,
        )

    async def follow(self, config: EngineConfig, factory: WorkerFactory) -> None:
        """Be a rank other than the first until that one ends.

        Raises what `RolloutEngine.from_config` does, and ParallelError where a rank is lost.
        """
        opened = partial(RolloutEngine.from_config, config, factory)
        # Its thread waits for rank 0 without end, and must not keep the process alive.
        following = on_thread("rank", partial(follow, config.parallel, opened))
        await asyncio.wrap_future(following)

    async def submit(self, turn: int, submissions: list[Submission]) -> None:
        async with self._turns.take(turn):
            for submission in submissions:
                self._reporter.submit(submission)

    async def abort(self, turn: int, request_ids: list[int]) -> None:
        """End requests by the cluster's ids; unknown ones do nothing."""
        async with self._turns.take(turn):
            self._reporter.abort(request_ids)

    async def call(
        self, turn: int, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> CallResult:
        """Call a method of the engine between two steps."""

        def run(engine: RolloutEngine) -> CallResult:
            value, error = None, None
            try:
                value = method(engine, *args, **kwargs)
            except ParallelError:  # the end of this replica
                raise
            except Exception as raised:  # the caller's
                error = raised
            return CallResult(
                value=value, error=error, unavailable_reason=engine.unavailable_reason
            )

        assert self._loop is not None, "open() comes first"
        async with self._turns.take(turn):
            future = self._loop.call(run)
        return await asyncio.wrap_future(future)

    async def sync(self, turn: int, serial: int) -> None:
        async with self._turns.take(turn):
            self._reporter.sync(serial)

    async def report(self) -> Report:
        """Returns when there is something to report. Asked for one at a time.

        Raises EngineStateError once the engine's loop is broken, ParallelError where a rank is
        lost.
        """
        try:
            return await self._reporter.report()
        except EngineStateError as error:
            if isinstance(error.__cause__, ParallelError):  # it broke the loop
                raise error.__cause__ from None
            raise

    async def heartbeat(self) -> float:
        """Seconds that the engine's step or call under way has taken; 0.0 while nothing is."""
        return 0.0 if self._loop is None else self._loop.busy_seconds

    async def close(self) -> None:
        loop = self._loop
        if loop is not None:
            engine = await asyncio.wrap_future(loop.call(lambda engine: engine))
            await asyncio.to_thread(loop.close)
            engine.close()


class _Turns:
    """Lets numbered calls begin in the order of their numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def take(self, turn: int) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._next == turn)
            try:
                yield
            finally:
                self._next += 1
                self._changed.notify_all()
