"""The protocols of an engine: what its callers ask of it, and what a cluster asks of replicas.

`RolloutEngine` documents the calls; `RolloutCluster` stands for several replicas.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rollout.engine.draft_corpus import CorpusDelta, ExternalCorpus, Publishing
from rollout.engine.metrics import EngineMetrics, EngineStatus, StepMetrics
from rollout.engine.tokenizer import PromptEncoder
from rollout.scheduler.step_limits import StepLimits
from rollout.types import (
    MemoryTag,
    PauseMode,
    Prompt,
    Request,
    Rollout,
    SamplingParams,
    TokenExtras,
)
from rollout.weights.bucket import PackedBucket
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.source import WeightSource
from rollout.weights.update_calls import UpdateCalls
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.weight_check import Checksums


class Engine(UpdateCalls, Protocol):
    """One process's `RolloutEngine`, which documents the calls, or many replicas behind one door.

    One thread calls it. Of several replicas a change reaches all or none.
    """

    # What it generates with

    @property
    def encoder(self) -> PromptEncoder: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context_len(self) -> int: ...
    @property
    def max_sequence_len(self) -> int: ...
    @property
    def max_running(self) -> int:
        """Requests that are decoded together, on all replicas."""
        ...

    @property
    def limits(self) -> StepLimits:
        """The limits of one step of one replica."""
        ...

    @property
    def lockstep(self) -> bool: ...

    # Requests

    def check(self, prompt: Prompt, params: SamplingParams) -> int: ...

    def compile_grammar(self, params: SamplingParams) -> None: ...

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
        """The request's tokens, logprobs, versions and extras grow from `step` to `step`."""
        ...

    def set_driver_thread(self) -> None:
        """The calling thread drives the engine from now on: it waits for calls of other threads."""
        ...

    def watch(self, request_id: int) -> None:
        """The request's tokens are wanted from step to step; called right after `submit`.

        A cluster may report the tokens of other requests late, at the latest when they end.
        """
        ...

    @property
    def has_unfinished(self) -> bool: ...

    def step(self) -> list[Rollout]:
        """Returns within milliseconds to a few tenths of a second, whether any ended or not."""
        ...

    def take_ended(self) -> list[Rollout]: ...
    def abort(self, request_id: int) -> None: ...

    def score_with_extras(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> tuple[list[float], TokenExtras]: ...

    # State

    def status(self) -> EngineStatus: ...
    def metrics(self) -> EngineMetrics: ...
    @property
    def last_step(self) -> StepMetrics: ...
    @property
    def unavailable_reason(self) -> str: ...
    @property
    def can_run(self) -> bool: ...
    @property
    def is_paused(self) -> bool: ...
    def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None: ...
    def continue_generation(self) -> None: ...
    @property
    def released_tags(self) -> frozenset[MemoryTag]: ...
    def release_memory(
        self, tags: Iterable[MemoryTag | str] = ("kv_cache", "weights"), keep_weights: bool = True
    ) -> dict[str, int]: ...
    def resume_memory(self, tags: Iterable[MemoryTag | str] | None = None) -> None: ...
    def flush_cache(self) -> None: ...
    def check_integrity(self) -> None: ...
    def close(self) -> None: ...

    # Weights

    @property
    def weight_version(self) -> int: ...
    @property
    def weight_versions(self) -> dict[str, int]: ...
    def begin_weight_update(self, manifest: Manifest | None = None, **options: Any) -> None: ...
    def end_weight_update(self, weight_version: int | None = None) -> UpdateCounts: ...
    def abandon_weight_update(self, reason: str = ...) -> None: ...
    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "gloo",
        timeout: float = 300.0,
    ) -> None: ...
    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None: ...
    def weights_digest(self, selector: str = "all") -> str: ...
    def check_weights(
        self, action: str = "checksum", selector: str = "all", skip: Sequence[str] = ()
    ) -> list[Checksums]: ...
    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]: ...

    # Corpora

    def add_external_corpus(
        self,
        name: str | None = None,
        *,
        documents: Sequence[str] | None = None,
        token_chunks: Sequence[Sequence[int]] | None = None,
        file_path: str | os.PathLike[str] | None = None,
        publish: Publishing | str = Publishing.WHEN_READY,
        wait: bool = False,
    ) -> str: ...
    def remove_external_corpus(self, name: str) -> None: ...
    def publish_external_corpus(self, name: str) -> None: ...
    def external_corpora(self) -> list[ExternalCorpus]: ...
    @property
    def corpus_tokens(self) -> int | None: ...
    def save_corpus(self, path: str | os.PathLike[str]) -> None: ...
    def load_corpus(self, path: str | os.PathLike[str]) -> None: ...
    def learned(self) -> dict[str, Any]: ...


class ReplicaEngine(Engine, Protocol):
    """The engine of a replica, of which a cluster asks more."""

    def weights_manifest(
        self, selector: str = "all", *, model_path: str | os.PathLike[str] | None = None
    ) -> dict[str, TensorSpec]: ...
    def read_weights(self, names: Sequence[str]) -> PackedBucket: ...
    def decline_weights(self, source: WeightSource, reason: str) -> None: ...
    def share_corpus(self, max_bytes: int = ...) -> None: ...
    def take_corpus_delta(self) -> CorpusDelta: ...
    def learn_corpus_deltas(self, deltas: Sequence[CorpusDelta]) -> None: ...
