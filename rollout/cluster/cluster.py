"""RolloutCluster: an engine that is many replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout.cluster.config import ClusterConfig
from rollout.cluster.corpora import ClusterCorpusCalls
from rollout.cluster.corpus_exchange import CorpusExchange
from rollout.cluster.external_corpora import ExternalCorpora
from rollout.cluster.in_flight import InFlightRequest
from rollout.cluster.messages import ReplicaFacts, Report
from rollout.cluster.replica import ReplicaPool
from rollout.cluster.replica_manager import WAIT_SECONDS, ReplicaManager
from rollout.cluster.replica_weight_sync import ReplicaWeightSync
from rollout.cluster.router import Router
from rollout.cluster.state_calls import ClusterStateCalls
from rollout.cluster.totals import ClusterMetrics, sum_of_metrics
from rollout.cluster.weights import ClusterWeightCalls
from rollout.config import EngineConfig
from rollout.engine.requests import RequestFactory
from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import WeightUpdateError
from rollout.scheduler.fitting import check_length
from rollout.types import FinishReason, Prompt, Request, Rollout, SamplingParams, TokenExtras


class RolloutCluster(ClusterWeightCalls, ClusterCorpusCalls, ClusterStateCalls):
    """An `Engine`. Means to its callers what a `RolloutEngine` does. One thread calls it.

    Requests are checked here and run on replicas. One whose replica dies goes on elsewhere, with
    the same seed after the tokens known here, so that its rollout is that of an undisturbed run.
    """

    def __init__(self, config: EngineConfig, cluster: ClusterConfig, pool: ReplicaPool) -> None:
        """Returns when all replicas have an engine, and takes the pool over.

        Raises what `RolloutEngine.from_config` does, and ClusterError.
        """
        self.config = config
        self._cluster = cluster
        self.members = ReplicaManager(pool, self)
        self._externals = ExternalCorpora(self.members)
        self.members.on_join(self._bring_state)
        self.weight_bringer = ReplicaWeightSync(self.members)
        self.corpus_exchange = (
            CorpusExchange(self.members, cluster.share_seconds, cluster.share_bytes)
            if cluster.share_corpus and cluster.replicas > 1
            else None
        )
        self._router = Router(pool.names)
        self._flights: dict[int, InFlightRequest] = {}
        self._ended: list[Rollout] = []
        self._reports = {}
        self._statuses = {}
        self._past = ClusterMetrics()
        self._num_steps = self._serial = 0
        self.is_paused = False
        self._released = {}
        self._update = None
        self._groups = {}
        self.facts: dict[str, ReplicaFacts] = {}
        try:
            while not self.members.all_joined:
                self.members.poll(WAIT_SECONDS)
            folder = config.model.tokenizer or config.model.path
            vocab_size = next(iter(self.facts.values())).vocab_size
            self.encoder = PromptEncoder.from_pretrained(folder, vocab_size)
        except BaseException:
            pool.close()
            raise
        self._versions = next(iter(self._statuses.values())).weight_versions
        self._last_version = self._versions["target"]
        some = next(iter(self.facts.values()))
        self._requests = RequestFactory(
            self.encoder,
            vocab_size,
            some.eos_token_ids,
            self._check_fits,
            records_routes=some.records_routes,
        )
        self.vocab_size = vocab_size
        self.eos_token_ids = some.eos_token_ids
        self.limits = some.limits
        self.max_running = some.limits.max_running * len(pool.names)
        self.max_context_len = some.max_context_len
        self.max_sequence_len = min(each.max_sequence_len for each in self.facts.values())

    # What it generates with

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
        self._flights[request.request_id] = InFlightRequest(request)
        self._router.add(request.request_id, request.group)
        return request

    def claim(self) -> None:
        """Nothing to do: a cluster does not refuse other threads."""

    def watch(self, request_id: int) -> None:
        """Its tokens come every ``cluster.report_seconds``, those of others every second or so."""
        self._flights[request_id].is_watched = True

    @property
    def has_unfinished(self) -> bool:
        return bool(self._ended or self._flights)

    def step(self) -> list[Rollout]:
        """Hand out what ended; waits some milliseconds where nothing has."""
        if self._flights and not self.is_paused:
            self._require_running()
        self._dispatch()
        self.members.poll(0.0 if self._ended else WAIT_SECONDS)
        self._dispatch()
        self._externals.poll()
        if self.corpus_exchange is not None:
            self.corpus_exchange.poll()
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
            self.members.joined[name].abort([request_id])
        flight.request.finish_reason = FinishReason.ABORT
        self._end(flight)

    def score_with_extras(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> tuple[list[float], TokenExtras]:
        scored = self.members.on_one("score_with_extras", prompt_ids, output_ids, params)
        if (
            lost := self._weights_unavailable_reason()
        ):  # replicas that came later have the checkpoint's
            raise WeightUpdateError(lost)
        return scored

    def _check_fits(self, request: Request, field: str) -> None:
        check_length(len(request.tokens), self.max_context_len, self.max_sequence_len, field)

    def _end(self, flight: InFlightRequest) -> None:
        del self._flights[flight.request.request_id]
        self._ended.append(self._requests.rollout(flight.request))

    def _abort_all(self) -> None:
        """They end with all tokens there are."""
        self.sync()
        for request_id in list(self._flights):
            self.abort(request_id)

    def close(self) -> None:
        """End all replicas, and Ray where the cluster started it."""
        self.members.close()

    # Replicas

    def _dispatch(self) -> None:
        if not self.can_run:
            return
        for name, request_ids in self._router.take().items():
            submissions = [self._flights[request_id].submission() for request_id in request_ids]
            self.members.joined[name].submit(submissions)

    def joined(self, name: str, facts: ReplicaFacts) -> None:
        """`Listener`'s."""
        self.facts.setdefault(name, facts)
        self._router.join(name, facts.limits.max_running)

    def reported(self, name: str, report: Report) -> None:
        """`Listener`'s."""
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
            if flight is not None:  # else it was aborted here meanwhile
                self._router.remove(ended.growth.request_id)
                flight.end(ended)
                self._end(flight)

    def died(self, name: str, reason: str) -> None:
        """`Listener`'s. Its requests come first among those that wait, in their order."""
        report = self._reports.pop(name, None)
        if report is not None:
            buried = replace(report.total, kv_slots=0, memory_bytes=0)
            self._past = sum_of_metrics([self._past, buried])
        for request_id in reversed(self._router.leave(name)):
            self._try_again(self._flights[request_id], reason)
        self._abandon_if_dead()

    def _try_again(self, flight: InFlightRequest, reason: str) -> None:
        """Whatever killed the replica, this request may have done it.

        Once it has seen so many deaths that one more would be its end, it runs alone, so that it
        answers for nobody else.
        """
        limit = self._cluster.max_deaths_per_request
        request = flight.request
        flight.deaths += 1
        if flight.is_alone and flight.deaths >= limit:
            request.finish_reason = FinishReason.ERROR
            request.error = (
                f"{flight.deaths} replicas died while they ran it, the last while it ran alone: "
                f"{reason}"
            )
            self._end(flight)
            return
        flight.is_alone = flight.deaths >= max(1, limit - 1)
        self._router.add(request.request_id, request.group, first=True, alone=flight.is_alone)
