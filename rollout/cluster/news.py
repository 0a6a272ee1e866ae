"""What a replica has to report: tokens every few milliseconds, ends at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import Future

from rollout.cluster.messages import Ended, Growth, Report, Submission
from rollout.cluster.totals import ClusterMetrics
from rollout.engine import RolloutEngine
from rollout.engine_loop import EngineLoop, Ticket
from rollout.types import FinishReason, Request, RequestStats, Rollout, TokenExtras

_SECONDS_BETWEEN_STATUSES = 0.5


class _Running:
    """A request on this replica, and how much of it was reported."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.ticket: Ticket | None = None  # when it was submitted
        self._reported = 0  # tokens

    def growth(
        self,
        tokens: list[int],
        prompt_len: int,
        logprobs: list[float],
        versions: list[int],
        extras: TokenExtras,
    ) -> Growth:
        """What is new. ``tokens`` after ``prompt_len``, and all of the others, it emitted."""
        first, self._reported = self._reported, len(tokens) - prompt_len
        return Growth(
            request_id=self.request_id,
            token_ids=tokens[prompt_len + first :],
            logprobs=logprobs[first:],
            weight_versions=versions[first:],
            extras=TokenExtras(
                raw_logprobs=extras.raw_logprobs[first:],
                sampling_logprobs=extras.sampling_logprobs[first:],
                top_logprobs=extras.top_logprobs[first:],
                entropies=extras.entropies[first:],
            ),
        )


class News:
    """What is to be reported.

    Collected on the engine loop's thread, reported from there between two steps, so nothing is
    seen half done.
    """

    def __init__(
        self, loop: EngineLoop[RolloutEngine], seconds: float, events: asyncio.AbstractEventLoop
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._events = events
        self._due = asyncio.Event()  # an end: at once
        self._growing = asyncio.Event()  # tokens: every so many seconds
        self._reported_at = 0.0
        self._running: dict[int, _Running] = {}  # the event loop's
        self._serial = 0
        self._owes_status = False
        # The engine loop's thread alone:
        self._grown: dict[int, tuple[_Running, Request]] = {}
        self._ended: list[Ended] = []
        self._status_at = 0.0  # read by the event loop too

    def submit(self, submission: Submission) -> None:
        running = _Running(submission.request_id)

        def on_tokens(request: Request, first_new: int) -> None:
            if not self._grown:
                self._wake(self._growing)
            self._grown[submission.request_id] = (running, request)

        running.ticket = self._loop.submit(
            submission.prompt_ids,
            submission.params,
            request_seed=submission.seed,
            partial_ids=submission.partial_ids,
            prompt_index=submission.prompt_index,
            sample_index=submission.sample_index,
            on_tokens=on_tokens,
        )
        self._running[submission.request_id] = running
        running.ticket.future.add_done_callback(lambda future: self._end(running, future))

    def abort(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is not None and running.ticket is not None:
                running.ticket.abort()

    def sync(self, serial: int) -> None:
        self._serial = serial
        self._growing.set()
        self._due.set()

    async def report(self) -> Report:
        with contextlib.suppress(TimeoutError):  # then it is for the status alone
            await asyncio.wait_for(self._growing.wait(), self._seconds_to_status())
        self._growing.clear()
        rest = self._reported_at + self._seconds - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._due.wait(), max(0.0, rest))
        self._due.clear()
        serial = self._serial
        report = await asyncio.wrap_future(
            self._loop.call(lambda engine: self._collect(engine, serial))
        )
        for ended in report.ended:
            del self._running[ended.growth.request_id]
        self._reported_at = time.monotonic()
        self._owes_status = report.status is None
        return report

    def _seconds_to_status(self) -> float | None:
        """None while nothing has happened since the last one."""
        if not self._owes_status:
            return None
        return max(0.0, self._status_at + _SECONDS_BETWEEN_STATUSES - time.monotonic())

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
                    growth=running.growth(
                        rollout.token_ids,
                        0,
                        rollout.logprobs,
                        rollout.weight_versions,
                        rollout.extras,
                    ),
                    finish_reason=rollout.finish_reason,
                    error=rollout.error,
                    stats=rollout.stats,
                )
            )
        self._wake(self._growing)
        self._wake(self._due)

    def _collect(self, engine: RolloutEngine, serial: int) -> Report:
        grown, self._grown = self._grown, {}
        ended, self._ended = self._ended, []
        status = None
        if time.monotonic() - self._status_at >= _SECONDS_BETWEEN_STATUSES:
            status = engine.status()
            self._status_at = time.monotonic()
        return Report(
            grown=[
                running.growth(
                    request.tokens,
                    request.prompt_len,
                    request.logprobs,
                    request.weight_versions,
                    request.extras,
                )
                for running, request in grown.values()
            ],
            ended=ended,
            total=ClusterMetrics.of(engine.metrics()),
            last_step=engine.last_step,
            status=status,
            serial=serial,
        )

    def _wake(self, event: asyncio.Event) -> None:
        self._events.call_soon_threadsafe(event.set)


def _refused(running: _Running, error: BaseException) -> Ended:
    """The cluster checks what it sends, so this is a replica unlike the others, or a broken one."""
    return Ended(
        growth=running.growth([], 0, [], [], TokenExtras()),
        finish_reason=FinishReason.ERROR,
        error=str(error),
        stats=RequestStats(),
    )
