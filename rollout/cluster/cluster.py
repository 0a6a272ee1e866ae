"""RolloutCluster: an engine that is many replicas."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rollout.cluster.config import ClusterConfig
from rollout.cluster.flights import Flight
from rollout.cluster.messages import ReplicaFacts, Report
from rollout.cluster.replica import Died, Event, Opened, Pool, Replica, ReplicaDiedError, Reported
from rollout.cluster.router import Router
from rollout.cluster.totals import sum_of_metrics, sum_of_steps
from rollout.config import EngineConfig
from rollout.encoding import PromptEncoder
from rollout.engine_metrics import EngineMetrics, StepMetrics
from rollout.engine_status import EngineStatus
from rollout.errors import ClusterError, InvalidInputError, OutOfMemoryError
from rollout.requests import RequestFactory
from rollout.types import (
    FinishReason,
    MemoryTag,
    PauseMode,
    Prompt,
    Request,
    Rollout,
    SamplingParams,
    TokenExtras,
)

log = logging.getLogger(__name__)

STEP_SECONDS = 0.01
"""The longest a step waits for something to happen."""

Joiner = Callable[[Replica], "Future[Any] | None"]


class RolloutCluster:
    """Means to its callers what a `RolloutEngine` does. One thread calls it.

    Requests are checked here and run on replicas. One whose replica dies goes on elsewhere, with
    the same seed after the tokens known here, so that its rollout is that of an undisturbed run.
    """

    def __init__(self, config: EngineConfig, cluster: ClusterConfig, pool: Pool) -> None:
        """Returns when all replicas have an engine, and takes the pool over.

        Raises what `RolloutEngine.from_config` does, and ClusterError.
        """
        self.config = config
        self._cluster = cluster
        self._pool = pool
        self._router = Router(pool.names, config.scheduler.max_running)
        self._flights: dict[int, Flight] = {}
        self._ended: list[Rollout] = []
        self._replicas: dict[str, Replica] = {}  # that have joined
        self._joining: dict[str, tuple[Replica, list[Future[Any]]]] = {}
        self._joiners: list[Joiner] = [self._bring_state]
        self._reports: dict[str, Report] = {}  # the latest of each life that reported
        self._statuses: dict[str, EngineStatus] = {}
        self._past = EngineMetrics()  # of lives that ended
        self._num_steps = 0
        self.is_paused = False
        try:
            self.facts = self._open()
        except BaseException:
            pool.close()
            raise
        folder = config.model.tokenizer or config.model.path
        self.encoder = PromptEncoder.from_pretrained(folder, self.facts.vocab_size)
        self._requests = RequestFactory(
            self.encoder, self.facts.vocab_size, self.facts.eos_token_ids, self._check_fits
        )

    def _open(self) -> ReplicaFacts:
        deadline = time.monotonic() + self._cluster.start_seconds
        facts: ReplicaFacts | None = None
        while len(self._replicas) < len(self._pool.names):
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{len(self._replicas)} of {len(self._pool.names)} replicas have started after "
                    f"{self._cluster.start_seconds} s"
                )
            for event in self._pool.events(STEP_SECONDS):
                self._handle(event)
                if isinstance(event, Opened):
                    facts = event.facts
            self._join_ready()
        assert facts is not None
        return facts

    # What it generates with

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def max_context_len(self) -> int:
        return self.facts.max_context_len

    @property
    def lockstep(self) -> bool:
        return False

    # Requests

    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        return self._requests.make(self.encoder.encode(prompt), params).prompt_len

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
        prompt_ids = self.encoder.encode(prompt)
        partial = self.encoder.encode(partial_ids, "partial_ids") if len(partial_ids) else []
        request = self._requests.make(
            prompt_ids, params, prompt_index, sample_index, partial=partial, seed=request_seed
        )
        self._flights[request.request_id] = Flight(request)
        self._router.add(request.request_id, request.group)
        return request

    @property
    def has_unfinished(self) -> bool:
        return bool(self._ended or self._flights)

    def step(self) -> list[Rollout]:
        if not self.can_run:
            return self.take_ended()
        self._dispatch()
        self._attend(0.0 if self._ended else STEP_SECONDS)
        self._dispatch()
        return self.take_ended()

    def take_ended(self) -> list[Rollout]:
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_id: int) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        name = self._router.remove(request_id)
        if name is not None:
            self._replicas[name].abort([request_id])
        flight.request.finish_reason = FinishReason.ABORT
        self._end(flight)

    def score_with_extras(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> tuple[list[float], TokenExtras]:
        return self.on_one("score_with_extras", prompt_ids, output_ids, params)

    def _check_fits(self, request: Request, field: str) -> None:
        length = len(request.tokens)
        if not 0 < length < self.max_context_len:
            raise InvalidInputError(
                f"len({field})",
                length,
                f"must have 1 to {self.max_context_len - 1} tokens: the context is "
                f"{self.max_context_len}",
            )
        if length >= self.facts.max_sequence_len:
            raise OutOfMemoryError(
                f"{field} of {length} tokens needs {length + 1} KV slots and there are "
                f"{self.facts.max_sequence_len}: raise memory.kv_bytes or memory.max_kv_tokens"
            )

    def _end(self, flight: Flight) -> None:
        del self._flights[flight.request.request_id]
        self._ended.append(self._requests.rollout(flight.request))

    # State

    def status(self) -> EngineStatus:
        self._attend(0.0)
        known = self._statuses
        first = next(iter(known.values()))
        return EngineStatus(
            running=sum(each.running for each in known.values()),
            waiting=sum(each.waiting for each in known.values()) + self._router.num_waiting,
            kv_slots=sum(each.kv_slots for each in known.values()),
            kv_used=sum(each.kv_used for each in known.values()),
            kv_cached=sum(each.kv_cached for each in known.values()),
            why_not=self.why_not,
            weight_versions=dict(self.weight_versions),
            total=self.metrics(),
            last_step=self.last_step,
            counters=first.counters,
            learned=first.learned,
            corpora=first.corpora,
            replicas=dict(known),
        )

    def metrics(self) -> EngineMetrics:
        return sum_of_metrics([self._past, *(each.total for each in self._reports.values())])

    @property
    def last_step(self) -> StepMetrics:
        return sum_of_steps(self._num_steps, [each.last_step for each in self._reports.values()])

    @property
    def why_not(self) -> str:
        return "generation is paused: call continue_generation()" if self.is_paused else ""

    @property
    def can_run(self) -> bool:
        return not self.why_not

    def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        self.on_all("pause_generation", mode)
        self.is_paused = True
        if mode == PauseMode.ABORT:
            for request_id in list(self._flights):
                self.abort(request_id)

    def continue_generation(self) -> None:
        self.on_all("continue_generation")
        self.is_paused = False

    @property
    def released_tags(self) -> frozenset[MemoryTag]:
        return frozenset()

    def release_memory(
        self, tags: Iterable[MemoryTag | str] = ("kv_cache", "weights"), keep_weights: bool = True
    ) -> dict[str, int]:
        freed: dict[str, int] = {}
        for each in self.on_all("release_memory", list(tags), keep_weights).values():
            for tag, num_bytes in each.items():
                freed[tag] = freed.get(tag, 0) + num_bytes
        return freed

    def resume_memory(self, tags: Iterable[MemoryTag | str] | None = None) -> None:
        self.on_all("resume_memory", None if tags is None else list(tags))

    def flush_cache(self) -> None:
        self.on_all("flush_cache")

    def check_integrity(self) -> None:
        self.on_all("check_integrity")

    def close(self) -> None:
        self._pool.close()

    @property
    def weight_versions(self) -> Mapping[str, int]:
        first = next(iter(self._statuses.values()))
        return first.weight_versions

    # Replicas

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """Those that have joined, by name."""
        return self._replicas

    def on_join(self, joiner: Joiner) -> None:
        """Call ``joiner(replica)`` for each replica that starts from now on.

        It gets requests when the futures of all joiners are done; a failed one counts as its
        death.
        """
        self._joiners.append(joiner)

    def on_all(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the engine's method gives on every replica that has joined and lives.

        Raises what the first that failed raised.
        """
        self._attend(0.0)
        answers = {
            name: replica.call(method, *args, **kwargs) for name, replica in self._replicas.items()
        }
        values: dict[str, Any] = {}
        failures: list[BaseException] = []
        for name, answer in answers.items():
            try:
                values[name] = answer.result()
            except ReplicaDiedError:
                continue
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return values

    def on_one(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the engine's method gives on a replica; on another, if it dies meanwhile."""
        while True:
            self._attend(0.0 if self._replicas else STEP_SECONDS)
            for replica in self._replicas.values():
                try:
                    return replica.call(method, *args, **kwargs).result()
                except ReplicaDiedError:
                    break

    def _dispatch(self) -> None:
        for name, request_ids in self._router.take().items():
            submissions = [self._flights[request_id].submission() for request_id in request_ids]
            self._replicas[name].submit(submissions)

    def _attend(self, timeout: float) -> None:
        """Handle what replicas have to say."""
        for event in self._pool.events(timeout):
            self._handle(event)
        if self._joining:
            self._join_ready()

    def _handle(self, event: Event) -> None:
        name = event.replica.name
        match event:
            case Opened(replica):
                answers = [joiner(replica) for joiner in self._joiners]
                futures = [answer for answer in answers if answer is not None]
                self._joining[name] = (replica, futures)
            case Reported(_, report):
                self._take(name, report)
            case Died(_, reason):
                self._bury(name, reason)

    def _bring_state(self, replica: Replica) -> Future[Any]:
        """A replica that starts is paused as the others are; learn its status too."""
        if self.is_paused:
            replica.call("pause_generation", PauseMode.IN_PLACE)
        answer = replica.call("status")
        answer.add_done_callback(lambda done: None)
        return answer

    def _join_ready(self) -> None:
        for name, (replica, futures) in list(self._joining.items()):
            if not all(future.done() for future in futures):
                continue
            del self._joining[name]
            errors = [future.exception() for future in futures]
            if any(errors):
                replica.kill()  # its death is heard of as any other
                continue
            self._statuses[name] = futures[0].result()
            self._replicas[name] = replica
            self._router.join(name)

    def _take(self, name: str, report: Report) -> None:
        self._num_steps += 1
        self._reports[name] = report
        if report.status is not None:
            self._statuses[name] = report.status
        for growth in report.grown:
            flight = self._flights.get(growth.request_id)
            if flight is not None:
                flight.grow(growth)
        for ended in report.ended:
            flight = self._flights.get(ended.growth.request_id)
            if flight is not None:
                self._router.remove(ended.growth.request_id)
                flight.end(ended)
                self._end(flight)

    def _bury(self, name: str, reason: str) -> None:
        self._joining.pop(name, None)
        self._replicas.pop(name, None)
        report = self._reports.pop(name, None)
        if report is not None:
            self._past = sum_of_metrics([self._past, report.total])
        limit = self._cluster.max_deaths_per_request
        for request_id in reversed(self._router.leave(name)):
            flight = self._flights[request_id]
            flight.deaths += 1
            if flight.is_alone and flight.deaths >= limit:
                flight.request.finish_reason = FinishReason.ERROR
                flight.request.error = (
                    f"{flight.deaths} replicas died while they ran it, the last while it ran "
                    f"alone: {reason}"
                )
                self._end(flight)
                continue
            flight.is_alone = flight.deaths >= max(1, limit - 1)
            self._router.add(request_id, flight.request.group, first=True, alone=flight.is_alone)
