"""Reports a replica's progress: an end at once, tokens that are wanted every few milliseconds,
everything else once a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from concurrent.futures import Future
from functools import partial

from rollout.cluster.messages import ClusterMetrics, Ended, Growth, Report, Submission
from rollout.engine.engine import RolloutEngine
from rollout.engine.engine_loop import EngineLoop, RequestHandle
from rollout.errors import EngineStateError
from rollout.types import EmittedTokens, FinishReason, Request, RequestStats, Rollout

_SECONDS_BETWEEN_STATUSES = 1.0


class _Running:
    """A request on this replica, and how much of it was reported."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.handle: RequestHandle | None = None  # when it was submitted
        self._reported = 0  # tokens

    def growth(self, of: Request | Rollout) -> Growth:
        """The tokens since the last report."""
        if isinstance(of, Request):
            tokens = of.emitted_since(self._reported)
        else:
            tokens = of.since(self._reported)
        self._reported += len(tokens.token_ids)
        return Growth(request_id=self.request_id, tokens=tokens)


class ProgressReporter:
    """Collects what a replica reports, and sends it.

    Collected on the engine loop's thread, reported from there between two steps, so nothing is
    seen half done.
    """

    def __init__(
        self, loop: EngineLoop[RolloutEngine], seconds: float, events: asyncio.AbstractEventLoop
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._events = events
        # The event loop's thread alone:
        self._running: dict[int, _Running] = {}
        self._reported_at = 0.0
        self._serial = 0
        self._changed = asyncio.Event()
        self._is_urgent = False  # a request has ended
        self._is_awaited = False  # one whose tokens are wanted has new ones
        self._has_changed = False  # something has, since the last status
        # The engine loop's thread alone:
        self._grown: dict[int, tuple[_Running, Request]] = {}
        self._ended: deque[Ended] = deque()  # also appended to by who submits, if it ended already
        self._status_at = 0.0
        loop.broken.add_done_callback(  # the next report says so
            lambda _: events.call_soon_threadsafe(lambda: self._note(urgent=True, awaited=False))
        )

    def submit(self, submission: Submission) -> None:
        """Queue a request, and report its tokens from now on."""
        running = _Running(submission.request_id)
        note = partial(self._note, urgent=False, awaited=submission.is_watched)

        def on_tokens(request: Request, first_new: int) -> None:
            if submission.request_id not in self._grown:
                self._grown[submission.request_id] = (running, request)
                self._events.call_soon_threadsafe(note)

        try:
            running.handle = self._loop.submit(
                submission.prompt_ids,
                submission.params,
                request_seed=submission.seed,
                partial_ids=submission.partial_ids,
                prompt_index=submission.prompt_index,
                sample_index=submission.sample_index,
                on_tokens=on_tokens,
            )
        except EngineStateError:  # it is broken: so is the next report, which is heard of
            self._note(urgent=True, awaited=False)
            raise
        self._running[submission.request_id] = running
        running.handle.future.add_done_callback(lambda future: self._end(running, future))

    def abort(self, request_ids: list[int]) -> None:
        """End requests; their ends are reported as any other."""
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is not None and running.handle is not None:
                running.handle.abort()

    def sync(self, serial: int) -> None:
        """Report at once, with this serial."""
        self._serial = serial
        self._note(urgent=True, awaited=False)

    async def report(self) -> Report:
        """The next report, when it is due."""
        while (seconds := self._seconds_to_report()) is None or seconds > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
        self._is_urgent = self._is_awaited = self._has_changed = False
        serial = self._serial
        report = await asyncio.wrap_future(
            self._loop.call(lambda engine: self._collect(engine, serial))
        )
        for ended in report.ended:
            del self._running[ended.growth.request_id]
        self._reported_at = time.monotonic()
        self._has_changed |= report.status is None
        return report

    def _seconds_to_report(self) -> float | None:
        """Seconds until the next report is due; None while there is nothing to report."""
        if self._is_urgent:
            return 0.0
        since = time.monotonic() - self._reported_at
        if self._is_awaited:
            return self._seconds - since
        return _SECONDS_BETWEEN_STATUSES - since if self._has_changed else None

    def _note(self, *, urgent: bool, awaited: bool) -> None:
        self._is_urgent |= urgent
        self._is_awaited |= awaited
        self._has_changed = True
        self._changed.set()

    # On the engine loop's thread

    def _end(self, running: _Running, future: Future[Rollout]) -> None:
        self._grown.pop(running.request_id, None)
        error = future.exception()
        if error is not None:
            self._ended.append(_refused(running, error))
        else:
            rollout = future.result()
            self._ended.append(
                Ended(
                    growth=running.growth(rollout),
                    finish_reason=rollout.finish_reason,
                    error=rollout.error,
                    stats=rollout.stats,
                    routed_experts=rollout.routed_experts,
                )
            )
        self._events.call_soon_threadsafe(lambda: self._note(urgent=True, awaited=False))

    def _collect(self, engine: RolloutEngine, serial: int) -> Report:
        grown, self._grown = self._grown, {}
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        status = None
        if time.monotonic() - self._status_at >= _SECONDS_BETWEEN_STATUSES:
            status = engine.status()
            self._status_at = time.monotonic()
        return Report(
            grown=[running.growth(request) for running, request in grown.values()],
            ended=ended,
            total=ClusterMetrics.of(engine.metrics()),
            last_step=engine.last_step,
            status=status,
            serial=serial,
        )


def _refused(running: _Running, error: BaseException) -> Ended:
    """The cluster checks what it sends, so this is a replica unlike the others, or a broken one."""
    return Ended(
        growth=Growth(request_id=running.request_id, tokens=EmittedTokens()),
        finish_reason=FinishReason.ERROR,
        error=str(error),
        stats=RequestStats(),
    )
