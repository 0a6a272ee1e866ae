"""Runs the engine's steps: schedule, run, commit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from rollout.engine.accept_lengths import AcceptLengths
from rollout.engine.call_guard import CallGuard
from rollout.engine.empty_outputs import EmptyOutputs
from rollout.engine.metrics import MetricsRecorder, StepMetrics
from rollout.engine.requests import RequestFactory
from rollout.engine.worker import Worker
from rollout.errors import OutOfMemoryError
from rollout.scheduler import Scheduler
from rollout.types import Batch, Request, Rollout, StepResult


class StepRunner:
    """Runs the steps of one engine, and hands out the rollouts that end in them.

    Args:
        worker: decodes; another one may take its place while no request is unfinished.
    """

    def __init__(
        self,
        worker: Worker,
        scheduler: Scheduler,
        requests: RequestFactory,
        guard: CallGuard,
        empty_outputs: EmptyOutputs,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = MetricsRecorder(worker.memory.slots.num_slots)
        self.accept_lengths = AcceptLengths(worker.weights.parts)
        self.guard = guard
        self.worker = worker
        self._requests = requests
        self._empty_outputs = empty_outputs
        self._cache_hits = 0  # of the memory's life, before this step
        self._ended: list[Rollout] = []  # that no stream has claimed
        self._claimed: dict[int, deque[Rollout]] = {}  # request id -> inbox of the stream it is of

    def run(self) -> None:
        self.guard.begin_step()
        try:
            self._run()
        finally:
            self.guard.end_step()

    def all_or_none(self) -> AbstractContextManager[None]:
        """A context for a call that ranks in lockstep make together: a failure on one fails it on
        all.

        Were it run again, this rank's forwards would be taken for later ones of the others.
        OutOfMemoryError comes before a forward, on all of them.
        """
        if self.worker.ranks.rows.size == 1:
            return nullcontext()
        return self.worker.ranks.all_or_none(
            "in the middle of a step", raised_by_all=OutOfMemoryError
        )

    # Requests

    @property
    def has_unfinished(self) -> bool:
        return bool(self._ended) or self.scheduler.has_unfinished

    def take_ended(self) -> list[Rollout]:
        """Rollouts that ended since the last call, except rollouts of streams."""
        ended, self._ended = self._ended, []
        return ended

    def add(self, requests: Collection[Request], inbox: deque[Rollout] | None = None) -> None:
        """Queue requests; their rollouts go to ``inbox``, where there is one."""
        with self.guard.uninterrupted():
            if inbox is not None:
                self._claimed |= dict.fromkeys([each.request_id for each in requests], inbox)
            for request in requests:
                self.scheduler.add(request)

    def abort(self, request_id: int) -> None:
        if not self.scheduler.has(request_id):
            return
        with self.guard.uninterrupted():
            request = self.scheduler.abort(request_id)
            if request is not None:
                self._hand_out([self._end(request)])

    def abort_all(self) -> None:
        with self.guard.uninterrupted():
            self._hand_out([self._end(request) for request in self.scheduler.abort_all()])

    def drop(self, request_ids: set[int]) -> None:
        """Forget these requests, emptying the set: nobody waits for them any more."""
        if not request_ids:
            return
        with self.guard.uninterrupted():
            while request_ids:
                request_id = request_ids.pop()
                self._claimed.pop(request_id, None)
                request = self.scheduler.abort(request_id)
                if request is not None:
                    self.worker.release(request)

    def retract_all(self) -> None:
        """Running requests give their KV back and wait."""
        with self.guard.uninterrupted():
            self.scheduler.retract_all()

    def drop_kv(self, *, retract: bool, abort: bool) -> None:
        """Drop the prefix cache: no later request may meet KV of the old weights.

        Running ones may, unless they are retracted or aborted.
        """
        if abort:
            self.abort_all()
        with self.guard.uninterrupted():
            if retract:
                self.scheduler.retract_all()
            self.worker.memory.reset()

    # One step

    def _run(self) -> None:
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        scheduled = time.perf_counter()
        with self.all_or_none():
            result = self.worker.step(batch)
        stepped = time.perf_counter()
        finished = self.scheduler.commit(batch, result)
        _note_first_tokens(batch)
        ended = [self._end(request) for request in finished]
        self._hand_out(ended)
        if ended:
            unfinished = self.scheduler.num_running + self.scheduler.num_waiting
            self._empty_outputs.check(min(unfinished, self.scheduler.limits.max_running))
        now = time.perf_counter()
        result.times.schedule = (scheduled - started + now - stepped) * 1e3
        result.times.total = (now - started) * 1e3
        self._record(batch, result, ended)
        self.accept_lengths.observe(batch, result)

    def _end(self, request: Request) -> Rollout:
        self.worker.release(request)
        rollout = self._requests.rollout(request)
        self._empty_outputs.count(request, rollout)
        return rollout

    def _hand_out(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            inbox = self._claimed.pop(rollout.request_id, None)
            (self._ended if inbox is None else inbox).append(rollout)

    def _record(self, batch: Batch, result: StepResult, ended: list[Rollout]) -> None:
        usage, hits = self.worker.memory.usage, self.worker.memory.counters.hit
        metrics = StepMetrics(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            kv_used=usage.used,
            kv_cached=usage.cached,
            cached_tokens=hits - self._cache_hits,
        )
        self._cache_hits = hits
        self.metrics.record(batch, result, metrics, ended)


def _note_first_tokens(batch: Batch) -> None:
    """Book the time to its first token for each request that has it since this step."""
    now = time.monotonic()
    for entry in batch.entries:
        request = entry.request
        if request.stats.first_token_seconds is None and len(request.tokens) > request.prompt_len:
            request.stats.first_token_seconds = now - request.submitted
