"""The protocol of an engine: what jobs, servers and trainers ask of it, and who answers.

`RolloutEngine` is the engine of one process. Two others stand for several of those, and read off
the protocol's methods which of them make a call: `Rank0Engine` for ranks that run one model
together, `RolloutCluster` for replicas.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

from rollout.engine.draft_corpus import ExternalCorpus, Publishing
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
from rollout.weights.manifest import Manifest

M = TypeVar("M", bound=Callable[..., Any])
P = ParamSpec("P")
Part = TypeVar("Part")
T = TypeVar("T")


class Ranks(enum.Enum):
    """The ranks of one model that make a call which is made on rank 0."""

    EVERY = enum.auto()
    """The call changes what all ranks share, or waits in their collectives."""

    FIRST = enum.auto()
    """The call reads what is alike on all ranks, and waits for none."""


class Replicas(enum.Enum):
    """The replicas of a cluster that make a call; the cluster does nothing of its own in it."""

    EVERY = enum.auto()  # nothing is returned
    ONE = enum.auto()  # whichever; its answer is returned


def called_on(*where: Ranks | Replicas) -> Callable[[M], M]:
    """Mark a method of `Engine` with the ranks and replicas that make the call. A cluster
    implements a method without a mark for replicas itself."""

    def mark(method: M) -> M:
        method.__dict__["called_on"] = where
        return method

    return mark


def methods_on(where: Ranks | Replicas, protocol: type) -> frozenset[str]:
    """The names of the protocol's methods that are marked so."""
    methods = ((name, getattr(protocol, name)) for name in dir(protocol))
    return frozenset(name for name, each in methods if where in getattr(each, "called_on", ()))


def part_call(
    attribute: str, method: Callable[Concatenate[Part, P], T]
) -> Callable[Concatenate[Any, P], T]:
    """An engine's call that a part of it answers: ``method`` of what it has as ``attribute``."""

    @wraps(method)
    def call(engine: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(getattr(engine, attribute), *args, **kwargs)

    return cast(Callable[Concatenate[Any, P], T], call)


class Engine(Protocol):
    """One process's `RolloutEngine`, or many replicas behind one door.

    One thread calls it. Every method means what it means in `RolloutEngine`; of several replicas a
    change reaches all or none.
    """

    # What it generates with

    @property
    def encoder(self) -> PromptEncoder: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
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

    @called_on(Ranks.FIRST)
    def check(self, prompt: Prompt, params: SamplingParams) -> int: ...

    @called_on(Ranks.FIRST)
    def compile_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar that parameters name, if they do, which may take seconds: `submit`
        then need not. On any thread, beside other calls. Raises InvalidInputError."""
        ...

    @called_on(Ranks.EVERY)
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

    @called_on(Ranks.FIRST)
    def set_driver_thread(self) -> None:
        """The calling thread drives the engine from now on: it waits for calls of other threads."""
        ...

    @called_on(Ranks.FIRST)
    def watch(self, request_id: int) -> None:
        """Somebody looks at what the request has from step to step: called right after `submit`.

        Where tokens come from afar, those of others may come late, at the latest when it ends.
        """
        ...

    @property
    def has_unfinished(self) -> bool: ...

    @called_on(Ranks.EVERY)
    def step(self) -> list[Rollout]:
        """Returns within milliseconds to a few tenths of a second, whether any ended or not."""
        ...

    @called_on(Ranks.FIRST)
    def take_ended(self) -> list[Rollout]: ...
    @called_on(Ranks.EVERY)
    def abort(self, request_id: int) -> None: ...

    @called_on(Ranks.EVERY)
    def score_with_extras(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> tuple[list[float], TokenExtras]: ...

    # State

    @called_on(Ranks.FIRST)
    def status(self) -> EngineStatus: ...
    @called_on(Ranks.FIRST)
    def metrics(self) -> EngineMetrics: ...
    @property
    def last_step(self) -> StepMetrics: ...
    @property
    def unavailable_reason(self) -> str: ...
    @property
    def can_run(self) -> bool: ...
    @property
    def is_paused(self) -> bool: ...
    @called_on(Ranks.EVERY)
    def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None: ...
    @called_on(Ranks.EVERY)
    def continue_generation(self) -> None: ...
    @property
    def released_tags(self) -> frozenset[MemoryTag]: ...
    @called_on(Ranks.EVERY)
    def release_memory(
        self, tags: Iterable[MemoryTag | str] = ("kv_cache", "weights"), keep_weights: bool = True
    ) -> dict[str, int]: ...
    @called_on(Ranks.EVERY)
    def resume_memory(self, tags: Iterable[MemoryTag | str] | None = None) -> None: ...
    @called_on(Ranks.EVERY, Replicas.EVERY)
    def flush_cache(self) -> None: ...
    @called_on(Ranks.FIRST, Replicas.EVERY)
    def check_integrity(self) -> None: ...
    @called_on(Ranks.EVERY)
    def close(self) -> None: ...

    # Weights

    @property
    def weight_version(self) -> int: ...
    @property
    def weight_versions(self) -> dict[str, int]: ...
    @called_on(Ranks.EVERY)
    def begin_weight_update(self, manifest: Manifest | None = None, **options: Any) -> None: ...
    @called_on(Ranks.EVERY)
    def end_weight_update(self, weight_version: int | None = None) -> None: ...
    @called_on(Ranks.EVERY)
    def abandon_weight_update(self, reason: str = ...) -> None: ...
    @called_on(Ranks.EVERY)
    def update_weights_from_tensor(
        self, named_tensors: Any, *, load_format: str | None = None, **options: Any
    ) -> None: ...
    @called_on(Ranks.EVERY)
    def update_weights_from_disk(self, model_path: str | Path, **options: Any) -> None: ...
    @called_on(Ranks.EVERY)
    def update_weights_from_ipc(
        self, handles: Mapping[str, Any] | Iterable[Mapping[str, Any]], **options: Any
    ) -> None: ...
    @called_on(Ranks.EVERY)
    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "gloo",
        timeout: float = 300.0,
        sender: str = "specrollout",
    ) -> None: ...
    @called_on(Ranks.EVERY)
    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None: ...
    @called_on(Ranks.EVERY)
    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str | torch.dtype],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        *,
        load_format: str | None = None,
        **options: Any,
    ) -> None: ...
    @called_on(Ranks.EVERY)
    def weights_digest(self, selector: str = "all") -> str: ...
    @called_on(Ranks.EVERY, Replicas.ONE)
    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[float]: ...

    # Corpora

    @called_on(Ranks.EVERY)
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
    @called_on(Ranks.EVERY)
    def remove_external_corpus(self, name: str) -> None: ...
    @called_on(Ranks.EVERY)
    def publish_external_corpus(self, name: str) -> None: ...
    @called_on(Ranks.EVERY)
    def external_corpora(self) -> list[ExternalCorpus]: ...
    @property
    def corpus_tokens(self) -> int | None: ...
    @called_on(Ranks.FIRST, Replicas.ONE)
    def save_corpus(self, path: str | os.PathLike[str]) -> None: ...
    @called_on(Ranks.EVERY)
    def load_corpus(self, path: str | os.PathLike[str]) -> None: ...
    @called_on(Ranks.FIRST, Replicas.ONE)
    def learned(self) -> dict[str, Any]: ...
