"""The rollout engine: requests in, rollouts out.

A step is three lines: schedule, run, commit. Two may be under way at once, of different requests.
Everything else here is the way in and out.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from rollout.checked import checked_int, checked_path
from rollout.config import EngineConfig
from rollout.engine.call_guard import CallGuard, exclusive
from rollout.engine.corpora import CorpusCalls
from rollout.engine.generation import GenerationCalls
from rollout.engine.lifecycle import StateCalls
from rollout.engine.metrics import EngineMetrics, MetricsRecorder, StepMetrics
from rollout.engine.overrides import engine_config
from rollout.engine.requests import RequestFactory
from rollout.engine.specs import WorkerFactory, worker_factory
from rollout.engine.status import EngineStatus
from rollout.engine.tokenizer import PromptEncoder
from rollout.engine.weights import WeightCalls
from rollout.engine.worker import FinishStep, Worker
from rollout.errors import EngineStateError, InvalidInputError, OutOfMemoryError
from rollout.models.loader import Progress
from rollout.parallel import ModelRanks
from rollout.scheduler import LengthForecast, Scheduler, TwoBatchOverlap
from rollout.scheduler.step_limits import StepLimits
from rollout.types import (
    Batch,
    Prompt,
    Request,
    Rollout,
    SamplingParams,
    StepResult,
)
from rollout.weights.groups import WeightGroups
from rollout.weights.ipc import HandleReceiver


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    """A step that was begun and is not finished."""

    batch: Batch
    finish: FinishStep
    running: int  # requests when it was scheduled
    halved: bool  # it is of a half of those
    schedule_ms: float


class _AllOrNone(AbstractContextManager[None]):
    """A call that fails on one rank leaves the others in the middle of it: they hear at once.

    Were it run again, this rank's forwards would be taken for later ones of the others.
    """

    __slots__ = ("_ranks",)

    def __init__(self, ranks: ModelRanks) -> None:
        self._ranks = ranks

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_before_a_forward = isinstance(error, OutOfMemoryError)
        if error is not None and not is_before_a_forward:
            self._ranks.close(f"it failed in the middle of a step: {error!r}")


class RolloutEngine(CorpusCalls, WeightCalls, StateCalls, GenerationCalls):
    """Generates rollouts of one model.

    One thread at a time calls it: a call while another thread is in one raises EngineStateError and
    does nothing. `EngineLoop` is for many threads. Counters (`metrics`, `last_step`),
    `unavailable_reason` and other properties may be read at any time.
    """

    def __init__(self, config: EngineConfig, worker: Worker) -> None:
        # With several ranks an interrupt must end the others' waiting at once: see `_all_or_none`.
        self.calls = CallGuard(holds_interrupts=worker.ranks.all.size == 1)
        self.config = config
        self.worker = worker
        folder = config.model.tokenizer or config.model.path
        self.encoder = PromptEncoder.from_pretrained(folder, worker.vocab_size)
        if config.model.tokenizer and self.encoder.tokenizer is None:
            raise InvalidInputError(
                "model.tokenizer", folder, "must be a folder with a tokenizer.json"
            )
        self.scheduler = Scheduler(
            worker.limits,
            worker.memory,
            lambda: self.worker.max_draft_tokens,
            LengthForecast(),
        )
        self._requests = RequestFactory(
            self.encoder,
            worker.vocab_size,
            worker.eos_token_ids,
            self.scheduler.check_fits,
            records_routes=worker.memory.routes is not None,
        )
        self._under_way: deque[_UnderWay] = deque()  # two at most, the oldest first
        self._overlap = TwoBatchOverlap(
            config.scheduler.overlap, hides=worker.model_device.type == "cuda"
        )
        self._cache_hits = 0  # of the memory's life, before this step
        self._recorder = MetricsRecorder(worker.memory.slots.num_slots)
        self.is_paused = False
        self.weight_groups = WeightGroups()
        self.weight_handles = HandleReceiver()
        self._ended: list[Rollout] = []  # the next step hands them out
        self._claimed: dict[int, deque[Rollout]] = {}  # request id -> inbox of the stream it is of
        self._unstarted = self._configured_documents()
        self._begin_cold_or_configured()

    @classmethod
    def from_config(
        cls, config: EngineConfig, factory: WorkerFactory, progress: Progress | None = None
    ) -> RolloutEngine:
        """``progress`` is told how far the model's weights are read."""
        return cls(config, factory(config, progress))

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        spec: str = "ngram",
        *,
        spec_options: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> RolloutEngine:
        """An engine for the model in the folder ``path``.

        Args:
            spec: a name in conf/spec: ``none``, ``ngram``, ``eagle``, ``mtp``, ``hybrid``.
            spec_options: over that file's own, e.g. ``{"num_draft_tokens": 12}``.
            overrides: any field of EngineConfig or of its parts: ``dtype``, ``device``,
                ``max_context_len``, ``kv_bytes``, ``max_running``, ``exact``, ``num_threads``, ...

        Raises InvalidInputError for an unknown name or value, CheckpointError for a broken folder,
        UnsupportedModelError for an architecture or a field of its config not implemented.
        """
        options = {} if spec_options is None else spec_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise InvalidInputError("spec_options", options, "must map names of options to values")
        factory = worker_factory(spec, **options)
        return cls.from_config(engine_config(checked_path(path, "path"), overrides), factory)

    @property
    def vocab_size(self) -> int:
        return self.worker.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model folder's: what ends a rollout unless its parameters say otherwise."""
        return self.worker.eos_token_ids

    @property
    def max_running(self) -> int:
        """Requests that are decoded together."""
        return self.limits.max_running

    @property
    def limits(self) -> StepLimits:
        """The limits of one step: as configured, else what suits the device and the model."""
        return self.scheduler.limits

    @property
    def max_context_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.worker.max_context_len

    @property
    def max_sequence_len(self) -> int:
        """Maximum sequence length in tokens: the context limit, or fewer with a smaller KV pool."""
        return self.worker.memory.max_sequence_len

    @property
    def lockstep(self) -> bool:
        """Other ranks wait in its forwards: see `step`."""
        return self.worker.lockstep

    # One step at a time, for servers

    @exclusive
    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        """Raise what `submit` would; computes nothing. Returns the prompt's length in tokens."""
        return self._requests.make(self.encoder.encode(prompt), params).prompt_len

    @exclusive
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prompt_index: int = 0,
        sample_index: int = 0,
        request_seed: int | None = None,
        partial_ids: Sequence[int] = (),
    ) -> Request:
        """Queue one sample of one prompt (``params.n`` is not looked at).

        Args:
            request_seed: instead of the one derived from (params.seed, prompt_index, sample_index);
                a `Rollout.seed`, to continue what was cut.
            partial_ids: tokens this rollout emitted before it was cut. They count as output for
                penalties and limits; the rollout returned holds only what comes after them.

        Raises InvalidInputError or OutOfMemoryError; the engine is as it was.
        """
        prompt_ids = self.encoder.encode(prompt)
        partial = self.encoder.encode(partial_ids, "partial_ids", may_be_empty=True)
        request = self._requests.make(
            prompt_ids, params, prompt_index, sample_index, partial=partial, seed=request_seed
        )
        with self.calls.uninterrupted():
            self.scheduler.add(request)
        return request

    def claim(self) -> None:
        """Let the calling thread wait where another one is in a call, for as long as that takes."""
        self.calls.driver = threading.get_ident()

    def watch(self, request_id: int) -> None:
        """Does nothing: in one process every step shows what each request has."""
        checked_int(request_id, "request_id")

    @property
    def has_unfinished(self) -> bool:
        return bool(self._ended) or self.scheduler.has_unfinished

    @exclusive
    def step(self) -> list[Rollout]:
        """Run one step; the rollouts that ended in it or since the last one, as they ended.

        Which of them end first depends on drafts and on what else runs. Those of a `stream` go to
        that stream, which has an order of its own. A step that raises can be run again. While
        generation is paused nothing runs. Where halves of the requests take turns
        (``scheduler.overlap``), a step of one of them is under way when this returns.

        With nothing unfinished only a worker in lockstep runs: other ranks wait in its forwards.
        Whoever drives the ranks steps each of them as often, while `any_rank_has_unfinished`, and
        pauses, scores and updates them alike.
        """
        has_reason = self.scheduler.has_unfinished or self.worker.lockstep
        if has_reason and not self.is_paused:
            self._run_step()
        return self._take_ended()

    @exclusive
    def take_ended(self) -> list[Rollout]:
        """Rollouts that ended since the last step, as aborted ones do. Runs nothing."""
        return self._take_ended()

    def _take_ended(self) -> list[Rollout]:
        ended, self._ended = self._ended, []
        return ended

    def _run_step(self) -> None:
        """Begin what can begin, and finish the step that was begun first."""
        self.require_running()
        self.load_configured_corpora()
        started = time.perf_counter()
        halved = self.worker.overlaps and self._overlap.wants(self.scheduler.num_running)
        self.calls.begin_step()
        try:
            while len(self._under_way) < 1 + halved and self._begin_step(halved):
                pass
            self._finish_step(started)
        except BaseException:
            self._under_way.clear()  # they can be run again, as the one that failed
            raise
        finally:
            self.calls.end_step()

    def _begin_step(self, halved: bool) -> bool:
        """False: nothing can run before what is under way has ended."""
        started = time.perf_counter()
        batch = self.scheduler.schedule([step.batch for step in self._under_way], halved=halved)
        if self._under_way and not batch.entries:
            return False
        scheduled = time.perf_counter()
        with self._all_or_none():
            finish = self.worker.begin_step(batch)
        self._under_way.append(
            _UnderWay(
                batch=batch,
                finish=finish,
                running=self.scheduler.num_running,
                halved=halved,
                schedule_ms=(scheduled - started) * 1e3,
            )
        )
        return True

    def _finish_step(self, started: float, *, drains: bool = False) -> None:
        """``started``: when the host turned to it, by the performance counter. ``drains``: no
        other step follows, so its time is that of the wait alone."""
        step = self._under_way.popleft()
        with self._all_or_none():
            result = step.finish()
        stepped = time.perf_counter()
        ended = [self._end(request) for request in self.scheduler.commit(step.batch, result)]
        self._hand_out(ended)
        now = time.perf_counter()
        result.times.schedule = step.schedule_ms + (now - stepped) * 1e3
        result.times.total = (now - started) * 1e3
        self._record(step, result, ended)
        last = self.last_step
        if not drains and step.batch.num_run_tokens == last.sampling > 0:
            self._overlap.observe(step.running, step.halved, last.generated_tokens, result.times)

    def _drain_steps(self) -> None:
        """Drain steps in flight before the engine's state is changed."""
        self.calls.begin_step()
        try:
            while self._under_way:
                self._finish_step(time.perf_counter(), drains=True)
        except BaseException:
            self._under_way.clear()
            raise
        finally:
            self.calls.end_step()

    def _all_or_none(self) -> AbstractContextManager[None]:
        return _AllOrNone(self.worker.ranks)

    def _hand_out(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            inbox = self._claimed.pop(rollout.request_id, None)
            (self._ended if inbox is None else inbox).append(rollout)

    @exclusive
    def abort(self, request_id: int) -> None:
        """End a request; the next step hands out what it has. Unknown or ended ids do nothing."""
        request_id = checked_int(request_id, "request_id")
        if not self.scheduler.has(request_id):
            return
        self._drain_steps()
        with self.calls.uninterrupted():
            request = self.scheduler.abort(request_id)
            if request is not None:
                self._hand_out([self._end(request)])

    @contextmanager
    def without_speculation(self) -> Iterator[None]:
        """Decode plainly while the context lasts: the same tokens, on the same weights and slots.

        Nothing is drafted, and drafts learn nothing. The prefix cache is empty at both ends. Raises
        EngineStateError while requests are unfinished. Ranks enter and leave it alike.
        """
        drafting = self.worker
        self._swap_worker(drafting)
        with drafting.without_speculation() as plain:
            self._swap_worker(plain)
            try:
                yield
            finally:
                self._swap_worker(drafting, abort=True)

    @exclusive
    def _swap_worker(self, worker: Worker, *, abort: bool = False) -> None:
        if abort:
            self._abort_all()
        if self.scheduler.has_unfinished:
            raise EngineStateError(
                "requests are unfinished: speculation is switched between them, not within"
            )
        self.flush_cache()
        self.worker = worker

    def metrics(self) -> EngineMetrics:
        """Counters since the engine was made, or since `reset_metrics`."""
        return self._recorder.total

    def reset_metrics(self) -> None:
        self._recorder.reset()

    @property
    def last_step(self) -> StepMetrics:
        return self._recorder.last

    @exclusive
    def status(self) -> EngineStatus:
        """The engine's status now. Costs well under a millisecond."""
        corpus = self.worker.draft_corpus
        usage = self.worker.memory.usage
        return EngineStatus(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            kv_slots=self.worker.memory.slots.num_slots,
            kv_used=usage.used,
            kv_cached=usage.cached,
            unavailable_reason=self.unavailable_reason,
            weight_versions=dict(self.weight_versions),
            total=copy.copy(self._recorder.total),
            last_step=copy.copy(self._recorder.last),
            counters=self.worker.counters(),
            learned=self.learned(),
            corpora=() if corpus is None else tuple(corpus.external_corpora()),
            corpus_tokens=self.corpus_tokens,
        )

    @exclusive
    def flush_cache(self) -> None:
        """Drop KV and prefix cache; running requests recompute theirs. The corpus stays."""
        self._leave_old_weights(retract=True, abort=False)

    @exclusive
    def close(self) -> None:
        """Let go of what others have a share in; it generates as before.

        External corpora that load are cancelled, for good; weight groups are left; the memory of
        senders on this host is unmapped. Of several ranks none can run any more.
        """
        super().close()
        self.weight_groups.close()
        self.weight_handles.release()
        self.worker.ranks.close()

    @exclusive
    def check_integrity(self) -> None:
        """Raises IntegrityError when a pool's books do not balance."""
        self.worker.memory.check_integrity()

    def _leave_old_weights(self, *, retract: bool, abort: bool) -> None:
        """No later request may meet KV of the old weights; running ones may, unless retracted."""
        self._drain_steps()
        if abort:
            self._abort_all()
        with self.calls.uninterrupted():
            if retract:
                self.scheduler.retract_all()
            self.worker.memory.reset()

    def _abort_all(self) -> None:
        self._drain_steps()
        with self.calls.uninterrupted():
            self._hand_out([self._end(request) for request in self.scheduler.abort_all()])

    def _end(self, request: Request) -> Rollout:
        self.worker.release(request)
        return self._requests.rollout(request)

    def _drop(self, request_id: int) -> None:
        self._under_way.clear()  # not finished: a step that raises must not keep anything here
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.worker.release(request)

    def _record(self, step: _UnderWay, result: StepResult, ended: list[Rollout]) -> None:
        usage, hits = self.worker.memory.usage, self.worker.memory.counters.hit
        metrics = StepMetrics(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            kv_used=usage.used,
            kv_cached=usage.cached,
            cached_tokens=hits - self._cache_hits,
        )
        self._cache_hits = hits
        self._recorder.record(step.batch, result, metrics, ended, took_turns=step.halved)
