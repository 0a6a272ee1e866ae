"""RolloutCluster: an engine that is many replicas."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from rollout.cluster.config import ClusterConfig
from rollout.cluster.corpora import ClusterCorpora, merged
from rollout.cluster.corpus_exchange import CorpusExchange
from rollout.cluster.lifecycle import ClusterLifecycle
from rollout.cluster.messages import ClusterMetrics, InFlightRequest, ReplicaFacts, Report
from rollout.cluster.replica import ReplicaPool
from rollout.cluster.replica_manager import WAIT_SECONDS, ReplicaManager
from rollout.cluster.reports import ReplicaReports
from rollout.cluster.router import Router
from rollout.cluster.weights import ClusterWeights
from rollout.config import EngineConfig
from rollout.engine.draft_corpus import ExternalCorpus, Publishing
from rollout.engine.engine import RolloutEngine
from rollout.engine.metrics import EngineStatus, StepMetrics
from rollout.engine.requests import RequestFactory
from rollout.engine.tokenizer import PromptEncoder
from rollout.errors import EngineStateError, WeightUpdateError
from rollout.scheduler.step_limits import check_length
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
from rollout.validation import checked_int
from rollout.weights.manifest import Manifest
from rollout.weights.source import WeightSource
from rollout.weights.update_calls import UpdateCalls
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.versions import TARGET
from rollout.weights.weight_check import Checksums


class RolloutCluster(UpdateCalls):
    """An `Engine` of many replicas, whose calls `RolloutEngine` documents. One thread calls it.

    Requests are checked here and run on replicas. One whose replica dies goes on elsewhere, with
    the same seed after the tokens known here, so that its rollout is that of an undisturbed run.
    """

    def __init__(self, config: EngineConfig, cluster: ClusterConfig, pool: ReplicaPool) -> None:
        """Returns when all replicas have an engine, and takes the pool over.

        Raises what `RolloutEngine.from_config` does, and ClusterError.
        """
        self.config = config
        self._cluster = cluster
        self.replicas = ReplicaManager(pool, self)
        self.reports = ReplicaReports(self.replicas)
        # What a replica is brought before it joins comes in this order.
        self.corpora = ClusterCorpora(self.replicas)
        self.lifecycle = ClusterLifecycle(self.replicas, self.reports, self._abort_all)
        self.weights = ClusterWeights(self.replicas, self._abort_all, config.parallel.size)
        self.corpus_exchange = (
            CorpusExchange(self.replicas, cluster.share_seconds, cluster.share_bytes)
            if cluster.share_corpus and cluster.replicas > 1
            else None
        )
        self._router = Router(pool.names)
        self._in_flight: dict[int, InFlightRequest] = {}
        self._ended: list[Rollout] = []
        self.facts: dict[str, ReplicaFacts] = {}
        try:
            while not self.replicas.all_joined:
                self.replicas.poll(WAIT_SECONDS)
            folder = config.model.tokenizer or config.model.path
            vocab_size = next(iter(self.facts.values())).vocab_size
            self.encoder = PromptEncoder.from_pretrained(folder, vocab_size)
        except BaseException:
            pool.close()
            raise
        self.weights.start_from(next(iter(self.reports.statuses.values())).weight_versions)
        some = next(iter(self.facts.values()))
        self._requests = RequestFactory(
            self.encoder,
            vocab_size,
            some.eos_token_ids,
            self._check_fits,
            records_routes=some.records_routes,
        )
        self.vocab_size = vocab_size
        self.limits = some.limits
        self.max_running = some.limits.max_running * len(pool.names)
        self.max_context_len = some.max_context_len
        self.max_sequence_len = min(each.max_sequence_len for each in self.facts.values())

    # What it generates with

    @property
    def lockstep(self) -> bool:
        """Always False: replicas do not wait for one another."""
        return False

    # Requests

    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        return self._requests.make(self.encoder.encode(prompt), params).prompt_len

    def compile_grammar(self, params: SamplingParams) -> None:
        """Replicas compile it for themselves when they get the request."""
        self._requests.compile(params)

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
        partial = self.encoder.encode(partial_ids, "partial_ids", may_be_empty=True)
        request = self._requests.make(
            prompt_ids, params, prompt_index, sample_index, partial=partial, seed=request_seed
        )
        self._in_flight[request.request_id] = InFlightRequest(request)
        self._router.add(request.request_id, request.group)
        return request

    def set_driver_thread(self) -> None:
        """Nothing to do: a cluster does not refuse other threads."""

    def watch(self, request_id: int) -> None:
        """Have the request's tokens reported every ``cluster.report_seconds``, not about once a
        second."""
        self._in_flight[request_id].is_watched = True

    @property
    def has_unfinished(self) -> bool:
        return bool(self._ended or self._in_flight)

    def step(self) -> list[Rollout]:
        """Hand out what ended; waits some milliseconds where nothing has."""
        if self._in_flight and not self.is_paused:
            self.require_running()
        self._dispatch()
        self.replicas.poll(0.0 if self._ended else WAIT_SECONDS)
        self._dispatch()
        if self.corpus_exchange is not None:
            self.corpus_exchange.poll()
        return self.take_ended()

    def take_ended(self) -> list[Rollout]:
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_id: int) -> None:
        """End a request with the tokens that are known here, at once."""
        in_flight = self._in_flight.get(checked_int(request_id, "request_id"))
        if in_flight is None:
            return
        name = self._router.remove(request_id)
        if name is not None:
            self.replicas.joined[name].abort([request_id])
        in_flight.request.finish_reason = FinishReason.ABORT
        self._end(in_flight)

    def score_with_extras(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> tuple[list[float], TokenExtras]:
        """Logprobs of given output tokens, by any one replica."""
        scored = self.replicas.on_one(
            RolloutEngine.score_with_extras, prompt_ids, output_ids, params
        )
        if lost := self.weights.unavailable_reason:  # who came later has the checkpoint's
            raise WeightUpdateError(lost)
        return scored

    def _check_fits(self, request: Request, field: str) -> None:
        check_length(len(request.tokens), self.max_context_len, self.max_sequence_len, field)

    def _end(self, in_flight: InFlightRequest) -> None:
        del self._in_flight[in_flight.request.request_id]
        self._ended.append(self._requests.rollout(in_flight.request))

    def _abort_all(self) -> None:
        """Abort every request, once all tokens that replicas have emitted are known here."""
        self.reports.sync()
        for request_id in list(self._in_flight):
            self.abort(request_id)

    # Whether it may run

    @property
    def is_paused(self) -> bool:
        return self.lifecycle.is_paused

    @property
    def released_tags(self) -> frozenset[MemoryTag]:
        return self.lifecycle.released_tags

    @property
    def unavailable_reason(self) -> str:
        if self.is_paused:
            return self.lifecycle.unavailable_reason
        return self.weights.unavailable_reason or self.lifecycle.unavailable_reason

    @property
    def can_run(self) -> bool:
        """Whether requests are sent to replicas now."""
        return not self.unavailable_reason

    def require_running(self) -> None:
        """Raises EngineStateError without memory, WeightUpdateError while weights are not whole."""
        if reason := self.unavailable_reason:
            raise (EngineStateError if self.released_tags else WeightUpdateError)(reason)

    def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        self.lifecycle.pause_generation(mode)

    def continue_generation(self) -> None:
        self.lifecycle.continue_generation()

    def release_memory(
        self, tags: Iterable[MemoryTag | str] = ("kv_cache", "weights"), keep_weights: bool = True
    ) -> dict[str, int]:
        return self.lifecycle.release_memory(tags, keep_weights)

    def resume_memory(self, tags: Iterable[MemoryTag | str] | None = None) -> None:
        """Take back what `release_memory` gave; replicas that start are brought weights again."""
        self.lifecycle.resume_memory(tags)
        self.weights.sync.try_again()

    def flush_cache(self) -> None:
        self.replicas.on_all(RolloutEngine.flush_cache)

    def check_integrity(self) -> None:
        self.replicas.on_all(RolloutEngine.check_integrity)

    def close(self) -> None:
        """End all replicas, and Ray where the cluster started it."""
        self.replicas.close()

    # What it does

    def metrics(self) -> ClusterMetrics:
        return self.reports.metrics()

    @property
    def last_step(self) -> StepMetrics:
        """The latest step of each replica, added up."""
        return self.reports.last_step

    def status(self) -> EngineStatus:
        """The replicas' latest, a second old at most, and their sums."""
        self.replicas.poll(0.0)
        known = self.reports.statuses
        return self.reports.status(
            waiting=self._router.num_waiting,
            unavailable_reason=self.unavailable_reason,
            weight_versions=self.weight_versions,
            corpora=merged({name: each.corpora for name, each in known.items()}),
        )

    # Weights

    @property
    def weight_version(self) -> int:
        return self.weights.versions[TARGET]

    @property
    def weight_versions(self) -> dict[str, int]:
        return dict(self.weights.versions)

    def update_weights(self, source: WeightSource, /, **options: Any) -> UpdateCounts | None:
        return self.weights.update_weights(source, **options)

    def begin_weight_update(self, /, manifest: Manifest | None = None, **options: Any) -> None:
        self.weights.begin_weight_update(manifest, **options)

    def end_weight_update(self, weight_version: int | None = None) -> UpdateCounts:
        return self.weights.end_weight_update(weight_version)

    def abandon_weight_update(self, reason: str = "abandoned by the caller") -> None:
        self.weights.abandon_weight_update(reason)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "gloo",
        timeout: float = 300.0,
    ) -> None:
        self.weights.init_weights_update_group(
            master_address,
            master_port,
            rank_offset,
            world_size,
            group_name,
            backend,
            timeout,
        )

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        self.weights.destroy_weights_update_group(group_name)

    def weights_digest(self, selector: str = "all") -> str:
        return self.weights.weights_digest(selector)

    def check_weights(
        self, action: str = "checksum", selector: str = "all", skip: Sequence[str] = ()
    ) -> list[Checksums]:
        """The checksums of every rank of each replica."""
        check = self.replicas.on_all(RolloutEngine.check_weights, action, selector, skip)
        return [checksums for of_ranks in check.values() for checksums in of_ranks]

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        return self.replicas.on_one(RolloutEngine.get_weights_by_name, name, truncate_size)

    # Corpora

    @property
    def corpus_tokens(self) -> int | None:
        """Tokens in the corpus of the replica that has most."""
        return self.reports.corpus_tokens

    def add_external_corpus(
        self,
        name: str | None = None,
        *,
        documents: Sequence[str] | None = None,
        token_chunks: Sequence[Sequence[int]] | None = None,
        file_path: str | os.PathLike[str] | None = None,
        publish: Publishing | str = Publishing.WHEN_READY,
        wait: bool = False,
    ) -> str:
        return self.corpora.add_external_corpus(
            name,
            documents=documents,
            token_chunks=token_chunks,
            file_path=file_path,
            publish=publish,
            wait=wait,
        )

    def remove_external_corpus(self, name: str) -> None:
        self.corpora.remove_external_corpus(name)

    def publish_external_corpus(self, name: str) -> None:
        self.corpora.publish_external_corpus(name)

    def external_corpora(self) -> list[ExternalCorpus]:
        return self.corpora.external_corpora()

    def load_corpus(self, path: str | os.PathLike[str]) -> None:
        self.corpora.load_corpus(path)

    def save_corpus(self, path: str | os.PathLike[str]) -> None:
        """Any one replica saves its corpus, by ``path`` on its host."""
        self.replicas.on_one(RolloutEngine.save_corpus, path)

    def learned(self) -> dict[str, Any]:
        """The learned state of any one replica."""
        return self.replicas.on_one(RolloutEngine.learned)

    # Replicas

    def _dispatch(self) -> None:
        if not self.can_run:
            return
        for name, request_ids in self._router.take().items():
            submissions = [self._in_flight[request_id].submission() for request_id in request_ids]
            self.replicas.joined[name].submit(submissions)

    def joined(self, name: str, facts: ReplicaFacts) -> None:
        """A replica that is up to date takes requests from now on. See `Listener`."""
        self.facts.setdefault(name, facts)
        self._router.join(name, facts.limits.max_running)

    def reported(self, name: str, report: Report) -> None:
        """Book the tokens and ended requests of a replica's report. See `Listener`."""
        self.reports.note(name, report)
        for growth in report.grown:
            in_flight = self._in_flight.get(growth.request_id)
            if in_flight is not None:
                in_flight.grow(growth)
        for ended in report.ended:
            in_flight = self._in_flight.get(ended.growth.request_id)
            if in_flight is not None:  # else it was aborted here meanwhile
                self._router.remove(ended.growth.request_id)
                in_flight.end(ended)
                self._end(in_flight)

    def died(self, name: str, reason: str) -> None:
        """Queue a dead replica's requests again, before those that wait and in their order. See
        `Listener`."""
        self.reports.note_death(name)
        for request_id in reversed(self._router.leave(name)):
            self._try_again(self._in_flight[request_id], reason)
        self.weights.abandon_if_dead()

    def _try_again(self, in_flight: InFlightRequest, reason: str) -> None:
        """Queue the request for another replica, or fail it once its deaths reach the limit: it may
        have killed them.

        Once it has seen so many deaths that one more would be its end, it runs alone, so that it
        answers for nobody else.
        """
        limit = self._cluster.max_deaths_per_request
        request = in_flight.request
        in_flight.deaths += 1
        if in_flight.is_alone and in_flight.deaths >= limit:
            request.finish_reason = FinishReason.ERROR
            request.error = (
                f"{in_flight.deaths} replicas died while they ran it, the last while it ran alone: "
                f"{reason}"
            )
            self._end(in_flight)
            return
        in_flight.is_alone = in_flight.deaths >= max(1, limit - 1)
        self._router.add(request.request_id, request.group, first=True, alone=in_flight.is_alone)
