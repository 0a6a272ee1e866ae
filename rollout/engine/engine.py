"""The rollout engine: requests in, rollouts out.

`RolloutEngine` is the one door to its parts, and holds the guard that lets one thread at a time
through: `Generation`, `EngineWeights`, `Lifecycle` and `Corpora`, which share a `StepRunner`.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Never, TypeVar, cast

import torch

from rollout.config import EngineConfig, ParallelConfig, engine_config
from rollout.engine.call_guard import CallGuard, exclusive
from rollout.engine.corpora import Corpora
from rollout.engine.draft_corpus import CorpusDelta, ExternalCorpus, Publishing
from rollout.engine.empty_outputs import EmptyOutputs
from rollout.engine.following_rank import FollowingRank
from rollout.engine.generation import Generation
from rollout.engine.lifecycle import Lifecycle
from rollout.engine.metrics import EngineMetrics, EngineStatus, StepMetrics
from rollout.engine.requests import RequestFactory
from rollout.engine.step_runner import StepRunner
from rollout.engine.streaming import RolloutStream
from rollout.engine.tokenizer import PromptEncoder
from rollout.engine.weights import EngineWeights
from rollout.engine.worker import Worker
from rollout.engine.worker_factory import WorkerFactory, shared_settings, worker_factory
from rollout.errors import EngineStateError, InvalidInputError
from rollout.models.checkpoint import Progress
from rollout.parallel import RankGroup
from rollout.parallel.rank_group import check_alike
from rollout.scheduler import LengthForecast, Scheduler
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
from rollout.validation import checked_int, checked_path
from rollout.weights.bucket import PackedBucket
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.rank_messages import JoinGroup
from rollout.weights.source import WeightSource
from rollout.weights.update_calls import UpdateCalls
from rollout.weights.update_counts import UpdateCounts
from rollout.weights.weight_check import Checksums

T = TypeVar("T")


class RolloutEngine(UpdateCalls):
    """Generates rollouts of one model.

    One thread at a time calls it: a call while another thread is in one raises EngineStateError and
    does nothing. `EngineLoop` is for many threads. Counters (`metrics`, `last_step`),
    `unavailable_reason` and other properties may be read at any time.
    """

    def __init__(self, config: EngineConfig, worker: Worker) -> None:
        # With several ranks an interrupt must end the others' waiting at once: see `telling`.
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
            lambda: worker.max_draft_tokens,
            LengthForecast(),
        )
        self.requests = RequestFactory(
            self.encoder,
            worker.vocab_size,
            worker.eos_token_ids,
            self.scheduler.check_fits,
            records_routes=self.records_routes,
        )
        self.steps = StepRunner(
            worker, self.scheduler, self.requests, self.calls, EmptyOutputs(self.encoder)
        )
        self.weights = EngineWeights(worker, self.steps)
        self.lifecycle = Lifecycle(worker, self.steps, self.weights.receiver.handles)
        self.corpora = Corpora(worker, self.encoder, self.steps)
        self.generation = Generation(
            worker, self.encoder, self.requests, self.steps, self.lifecycle, self.corpora
        )
        self.when_closed = ExitStack()
        """Contexts that `close` leaves after the engine has ended."""
        with worker.ranks.leader.leading():
            worker.calibrate()

    @classmethod
    def from_config(
        cls, config: EngineConfig, factory: WorkerFactory, progress: Progress | None = None
    ) -> RolloutEngine:
        """Build the worker by its factory. ``progress`` is told how far the model's weights are
        read. On tensor-parallel ranks other than the first it is a `FollowingRank`."""
        worker = factory(config, progress)
        with worker.ranks.all_or_none("while it started"):
            check_alike(worker.ranks.all, shared_settings(factory, worker))
            if worker.ranks.tensor.rank:
                return cast(RolloutEngine, FollowingRank(worker))
            return cls(config, worker)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        spec: str = "ngram",
        *,
        spec_options: Mapping[str, Any] | None = None,
        load_format: str = "safetensors",
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        max_context_len: int | None = None,
        record_routes: bool = False,
        kv_bytes: int | None = None,
        kv_fraction: float | None = None,
        max_kv_tokens: int | None = None,
        prefix_cache: bool = True,
        state_slots: int | None = None,
        state_interval: int = 512,
        window_slots: int | None = None,
        graph_bytes: int = 1 << 30,
        graph_rows: int = 1024,
        max_running: int | None = None,
        max_step_tokens: int | None = None,
        chunk_len: int | None = None,
        parallel: ParallelConfig | Mapping[str, Any] | None = None,
        exact: bool = True,
        num_threads: int | None = None,
        **unknown: Never,
    ) -> RolloutEngine:
        """An engine for the model in a folder, or of that name on the hub.

        Args:
            path: a folder with config.json and safetensors, or ORG/NAME or ORG/NAME@REVISION.
            spec: a name in conf/spec: ``none``, ``ngram``, ``eagle``, ``mtp``, ``hybrid``.
            spec_options: over that file's own, e.g. ``{"num_draft_tokens": 12}``.
            load_format: ``dummy`` reads no weights: a trainer sends all of them first.
            tokenizer: as ``path``; default: the model's own.
            dtype: ``float32``, ``bfloat16``, ``float16`` or torch's; ``auto``: the checkpoint's, or
                float32 where the device is slow in that.
            device: ``cuda``, ``cuda:1``, ``cpu``; ``auto``: cuda if there is one, else cpu.
            max_context_len: tokens of prompt and output; default: the checkpoint's limit.
            record_routes: also store which experts each token went to.
            kv_bytes: memory of KV slots and states in bytes; default: by ``kv_fraction``.
            kv_fraction: that memory as a share of what is free once the model is loaded, in (0, 1);
                default: 0.5 on a CPU, 0.85 on a GPU.
            max_kv_tokens: most KV slots; default: 262,144 on a CPU, 4,194,304 on a GPU.
            prefix_cache: keep the KV of prompts and outputs for requests that begin alike.
            state_slots: recurrent states of prefixes; default: by ``max_running`` and memory.
            state_interval: prefill tokens between two states in the prefix cache.
            window_slots: KV slots of layers with a window; 0: as many as of the others.
            graph_bytes: most memory of captured forwards; 0 captures none.
            graph_rows: query rows of the largest step that is captured, up to 4096.
            max_running: requests decoded together; default: 32 on a CPU, up to 256 on a GPU.
            max_step_tokens: query tokens of one step without draft nodes; default: 512 on a CPU, up
                to 2,048 on a GPU.
            chunk_len: longest prefill chunk of one request in one step.
            parallel: ranks that run the model, which each make this call: a ParallelConfig or its
                fields; default: one process. Tensor-parallel ones but the first get a
                `FollowingRank`, which has some of an engine's calls.
            exact: outputs are bitwise independent of batch, chunks, caches and drafts.
            num_threads: CPU threads; default: OMP_NUM_THREADS or torch's, where that is given, else
                what is measured to be fast.
            unknown: refused by name, with the name that is meant.

        Raises InvalidInputError for an unknown name or value, CheckpointError for a broken folder,
        UnsupportedModelError for an architecture or a field of its config not implemented.
        """
        options = {} if spec_options is None else spec_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise InvalidInputError("spec_options", options, "must map names of options to values")
        factory = worker_factory(spec, **options)
        overrides = {
            "load_format": load_format, "tokenizer": tokenizer, "dtype": dtype, "device": device,
            "max_context_len": max_context_len, "record_routes": record_routes,
            "kv_bytes": kv_bytes, "kv_fraction": kv_fraction, "max_kv_tokens": max_kv_tokens,
            "prefix_cache": prefix_cache, "state_slots": state_slots,
            "state_interval": state_interval, "window_slots": window_slots,
            "graph_bytes": graph_bytes, "graph_rows": graph_rows, "max_running": max_running,
            "max_step_tokens": max_step_tokens, "chunk_len": chunk_len,
            "parallel": {} if parallel is None else parallel, "exact": exact,
            "num_threads": num_threads, **unknown,
        }  # fmt: skip
        return cls.from_config(engine_config(checked_path(path, "path"), overrides), factory)

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary size: token ids are below it."""
        return self.worker.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model folder's end tokens: they end a rollout unless its parameters say otherwise."""
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
    def records_routes(self) -> bool:
        """Whether it is known which experts tokens go to."""
        return self.worker.memory.routes is not None

    @property
    def tensor_ranks(self) -> RankGroup:
        """The ranks that compute each forward of this model together."""
        return self.worker.ranks.tensor

    @property
    def lockstep(self) -> bool:
        """Whether other ranks wait in this engine's forwards: see `step`."""
        return self.worker.lockstep

    # Requests that return when all is done

    @exclusive
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Rollout]:
        """All samples of all prompts, in prompt order, the samples of one prompt together.

        A prompt is text, which is taken as it stands, token ids, or chat messages such as
        ``[{"role": "user", "content": "..."}]``, which go through the tokenizer's chat template:
        chat models want messages.

        With ``parallel.mode=lockstep`` every rank makes this call, with prompts of its own or none,
        and takes part until those of all have ended. Tensor-parallel ranks all make it too; each
        gets the rollouts of rank 0's prompts.
        """
        return self.led(partial(self.generation.generate, prompts, params))

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> RolloutStream:
        """Each rollout as it finishes, in the order of plain decoding.

        The order is that in which plain decoding of this stream alone, ``max_running`` requests at
        a time in the order given, would finish them; each comes as soon as no other can come
        before it. So whoever takes the first few gets the same ones whatever was drafted, whoever
        was admitted first and however fast it went. An aborted one comes at once, and when a step
        raises, those that had ended come before the error.

        Every prompt is checked before anything is submitted; InvalidInputError names the first bad
        one. Leaving the iterator early aborts what is unfinished; ``close()`` does it at once.
        """
        return self.generation.stream(prompts, params)

    @exclusive
    def score(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> list[float]:
        """Logprobs of given output tokens, float32: bitwise those generation reports for them."""
        return self.score_with_extras(prompt_ids, output_ids, params)[0]

    @exclusive
    def score_with_extras(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams | None = None,
    ) -> tuple[list[float], TokenExtras]:
        """`score`, with the other numbers ``params`` asks for (entropy, raw logprobs, ...).

        Where this rank's call is refused, others in lockstep with it are served all the same.
        """
        score = self.generation.score_with_extras
        return self.led(partial(score, prompt_ids, output_ids, params))

    @exclusive
    def score_with_logits(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        observe: Callable[[torch.Tensor], object],
        params: SamplingParams | None = None,
    ) -> list[float]:
        """`score`, which also shows logits.

        ``observe``: called on rank 0 with the logits [R, V] of the output's rows, in the model's
        dtype and in order, block by block; each is gone after the call.
        """
        score = self.generation.score_with_extras
        return self.led(partial(score, prompt_ids, output_ids, params, observe))[0]

    # One step at a time, for servers

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar that parameters name, if they do, which may take seconds: `submit`
        then need not. Patterns of stops as well. May be called on any thread, beside other calls.
        Raises InvalidInputError."""
        self.requests.compile(params)

    @exclusive
    def check(self, prompt: Prompt, params: SamplingParams) -> int:
        """Raise what `submit` would; computes nothing. Returns the prompt's length in tokens."""
        return self.requests.make(self.encoder.encode(prompt), params).prompt_len

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
        request = self.requests.make(
            prompt_ids, params, prompt_index, sample_index, partial=partial, seed=request_seed
        )
        self.steps.add([request])
        return request

    @contextmanager
    def leading(self) -> Iterator[None]:
        """A context on rank 0 of tensor-parallel ranks, while the others are in
        `FollowingRank.follow`: steps, streams and scores in it are run by all."""
        with self.worker.ranks.leader.leading():
            yield

    @exclusive
    def led(self, call: Callable[[], T]) -> T:
        """Make a call that tensor-parallel ranks follow, each by its own `FollowingRank.led`; its
        result is what theirs return."""
        return self.worker.ranks.leader.run(call)

    def set_driver_thread(self) -> None:
        """Let the calling thread wait where another one is in a call, for as long as that takes."""
        self.calls.driver = threading.get_ident()

    def watch(self, request_id: int) -> None:
        """Does nothing: in one process every step shows what each request has."""
        checked_int(request_id, "request_id")

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is unfinished, or its rollout was not handed out."""
        return self.steps.has_unfinished

    @exclusive
    def step(self) -> list[Rollout]:
        """Run one step; the rollouts that ended in it or since the last one, as they ended.

        Which of them end first depends on drafts and on what else runs. Those of a `stream` go to
        that stream, which has an order of its own. A step that raises can be run again. While
        generation is paused nothing runs.

        With nothing unfinished only a worker in lockstep runs: other ranks wait in its forwards.
        Whoever drives the ranks steps each of them as often, while `any_rank_has_unfinished`, and
        pauses, scores and updates them alike.
        """
        has_reason = self.scheduler.has_unfinished or self.worker.lockstep
        if has_reason and not self.is_paused:
            self.generation.run_step()
        return self.steps.take_ended()

    @exclusive
    def take_ended(self) -> list[Rollout]:
        """Rollouts that ended since the last step, as aborted ones do. Runs nothing."""
        return self.steps.take_ended()

    @exclusive
    def any_rank_has_unfinished(self) -> bool:
        """Whether any rank in lockstep with this one has something unfinished.

        A call that each of them makes, before each `step`.
        """
        return self.generation.any_rank_has_unfinished()

    @exclusive
    def abort(self, request_id: int) -> None:
        """End a request; the next step hands out what it has. Unknown or ended ids do nothing."""
        self.steps.abort(checked_int(request_id, "request_id"))

    @contextmanager
    def without_speculation(self) -> Iterator[None]:
        """Decode plainly while the context lasts: the same tokens, on the same weights and slots.

        Nothing is drafted, and drafts learn nothing. The prefix cache is empty at both ends. Raises
        EngineStateError while requests are unfinished. Ranks enter and leave it alike.
        """
        self._decode_with(self.worker)
        with self.worker.without_speculation() as plain:
            self._decode_with(plain)
            try:
                yield
            finally:
                self._decode_with(self.worker, abort=True)

    @exclusive
    def _decode_with(self, worker: Worker, *, abort: bool = False) -> None:
        if abort:
            self.steps.abort_all()
        if self.scheduler.has_unfinished:
            raise EngineStateError(
                "requests are unfinished: speculation is switched between them, not within"
            )
        self.flush_cache()
        self.steps.worker = worker
        self.scheduler.max_draft_tokens = lambda: worker.max_draft_tokens

    def metrics(self) -> EngineMetrics:
        """Counters since the engine was made, or since `reset_metrics`."""
        return self.steps.metrics.total

    @exclusive
    def reset_metrics(self) -> None:
        """Set all totals of the metrics to zero."""
        self.steps.metrics.reset()

    @property
    def last_step(self) -> StepMetrics:
        """The numbers of the latest step."""
        return self.steps.metrics.last

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
            total=copy.copy(self.metrics()),
            last_step=copy.copy(self.last_step),
            counters=self.worker.counters(),
            learned=self.learned(),
            corpora=() if corpus is None else tuple(corpus.external_corpora()),
            corpus_tokens=self.corpus_tokens,
        )

    # Whether it may run

    @property
    def is_paused(self) -> bool:
        """Whether `pause_generation` was called, and not `continue_generation` since."""
        return self.lifecycle.is_paused

    @property
    def released_tags(self) -> frozenset[MemoryTag]:
        """The memory that `release_memory` released and `resume_memory` has not resumed."""
        return self.worker.memory_saver.released

    @property
    def unavailable_reason(self) -> str:
        """Why no step can run now; empty when one can."""
        return self.lifecycle.unavailable_reason

    @property
    def can_run(self) -> bool:
        """Whether a step can run now."""
        return not self.unavailable_reason

    @exclusive
    def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Run nothing until `continue_generation`. Between two steps; again is the same as once.

        Args:
            mode: ``abort``: what is unfinished ends, with what it has. ``retract``: running
                requests give their KV back and wait. ``in_place``: they keep it.

        Requests can be submitted meanwhile; they wait.
        """
        self.lifecycle.pause_generation(mode)

    @exclusive
    def continue_generation(self) -> None:
        """End a pause; does nothing where there is none."""
        self.lifecycle.continue_generation()

    @exclusive
    def release_memory(
        self, tags: Iterable[MemoryTag | str] = ("kv_cache", "weights"), keep_weights: bool = True
    ) -> dict[str, int]:
        """Give memory back, of the target and of drafts, until `resume_memory`; bytes by tag.

        The operating system and other processes have it when this returns. Nothing can run without
        weights and KV cache; requests can be submitted, and wait. Senders' shared memory is let go
        of too, whatever the tags; it is not ours to count.

        Args:
            tags: ``kv_cache``: running requests go back to wait and compute theirs again, and the
                prefix cache is dropped; the corpus stays. ``weights``. ``graphs``: of CUDA; none
                is captured until `resume_memory`. They are dropped with either of the others too,
                whose addresses they hold, and are then captured again by themselves.
            keep_weights: their values go to host memory, which on the CPU frees none of it, and
                come back bitwise. Else they are lost, and after `resume_memory` the engine refuses
                to run until a full update.

        Raises InvalidInputError for an unknown tag, EngineStateError for one that is released,
        WeightUpdateError during an update; nothing was released then.
        """
        return self.lifecycle.release_memory(tags, keep_weights)

    @exclusive
    def resume_memory(self, tags: Iterable[MemoryTag | str] | None = None) -> None:
        """Take back released memory; by default all of it.

        Weights may come first and be updated before the KV cache has its memory. Addresses may
        change. Raises InvalidInputError for an unknown tag, EngineStateError for one that is not
        released.
        """
        self.lifecycle.resume_memory(tags)

    @exclusive
    def flush_cache(self) -> None:
        """Drop KV and prefix cache; running requests recompute theirs. The corpus stays."""
        self.steps.drop_kv(retract=True, abort=False)

    @exclusive
    def check_integrity(self) -> None:
        """Raises IntegrityError where KV slots, drafts' KV or the corpus contradict themselves."""
        self.worker.check_integrity(self.scheduler.running)

    @exclusive
    def close(self) -> None:
        """Release what is shared with other processes. The engine generates as before.

        External corpora that load are cancelled, for good; weight groups are left; the memory of
        senders on this host is unmapped. Of several ranks none can run any more.
        """
        self.corpora.close()
        self.weights.receiver.close()
        with self.when_closed:
            self.worker.ranks.close()

    # Weights

    @property
    def torn_reason(self) -> str:
        """Why the weights cannot be sampled from; empty when they can."""
        return self.lifecycle.torn_reason

    @property
    def is_updating_weights(self) -> bool:
        """Whether a weight update has begun and not ended."""
        return self.worker.weights.is_under_way

    @property
    def weight_version(self) -> int:
        """The version of the target's weights, which each token carries."""
        return self.worker.weights.version

    @property
    def weight_versions(self) -> dict[str, int]:
        """Weight version by part: ``target``, and each draft, which counts its updates unless they
        were numbered."""
        return self.worker.weights.versions

    @exclusive
    def update_weights(self, source: WeightSource, /, **options: Any) -> UpdateCounts | None:
        return self.weights.update(source, options)

    @exclusive
    def begin_weight_update(self, /, manifest: Manifest | None = None, **options: Any) -> None:
        """Open an update that several calls bring.

        ``manifest``: all that is going to come; what is wrong with it is refused here. From the
        first byte to `end_weight_update` no step runs. Raises InvalidInputError, and
        WeightUpdateError while another update is under way.
        """
        self.weights.begin_update(manifest, options)

    @exclusive
    def end_weight_update(self, weight_version: int | None = None) -> UpdateCounts:
        """Commit: the next step samples from the new weights. Returns how many tensors were stored
        and how many ignored.

        ``weight_version``: for a caller that begins without knowing it; one that is in use is
        refused, and the update stays open.

        The prefix cache is dropped and the n-gram corpus kept. Requests in flight go on with all
        their KV recomputed; with ``flush_cache=False`` they keep it. Where only drafts have new
        weights, everything of the target's is kept.
        """
        return self.weights.end_update(weight_version)

    @exclusive
    def abandon_weight_update(self, reason: str = "abandoned by the caller") -> None:
        """Give up the open update, if there is one: refused until a full one if it had begun."""
        self.weights.abandon_update(reason)

    @exclusive
    def decline_weights(self, source: WeightSource, reason: str) -> None:
        """Take off the wire what the sender of a `GroupSource` has announced; nothing is loaded."""
        self.weights.decline(source, reason)

    @exclusive
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
        """Join a group that weights come through, at rank ``rank_offset`` (the sender is rank 0).

        Ranks that run one model join it one after the other from ``rank_offset`` on, and count each
        in ``world_size``.

        Rank 0 is a `WeightGroup`, or a group of torch's own rendezvous at that address. Waits for
        all ``world_size`` members. Raises WeightUpdateError where some are missing after
        ``timeout`` seconds. An update through it that says no timeout of its own waits as long.
        """
        group = JoinGroup(
            master_address, master_port, rank_offset, world_size, group_name, backend, timeout
        )  # fmt: skip
        self.weights.join_group(group)

    @exclusive
    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """Leave a group. Raises InvalidInputError for one this engine is not in."""
        self.weights.leave_group(group_name)

    @exclusive
    def weights_manifest(
        self, selector: str = "all", *, model_path: str | os.PathLike[str] | None = None
    ) -> dict[str, TensorSpec]:
        """The manifest of a full update; with ``model_path``, of one from that folder.

        Raises what `update_weights_from_disk` does.
        """
        return self.weights.manifest(selector, model_path)

    @exclusive
    def read_weights(self, names: Sequence[str]) -> PackedBucket:
        """Whole copies of these tensors, a source for another engine's `update_weights`.

        Raises InvalidInputError for an unknown name, WeightUpdateError while the weights are not
        those of one version, EngineStateError while they are released.
        """
        return self.weights.read(names)

    @exclusive
    def weights_digest(self, selector: str = "all") -> str:
        """SHA-256 over names, dtypes, shapes and bytes of the weights, in hexadecimal."""
        return self.weights.digest(selector)

    @exclusive
    def check_weights(
        self, action: str = "checksum", selector: str = "all", skip: Sequence[str] = ()
    ) -> list[Checksums]:
        """Check that an update brings every tensor: ``snapshot``, ``reset_tensors``, an update,
        ``compare``. ``checksum`` returns checksums by rank; see `WeightCheck.run`."""
        return self.weights.check(action, selector, skip)

    @exclusive
    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first rows of a tensor, or values of a vector. Raises InvalidInputError for an
        unknown name."""
        return self.weights.first_rows(name, truncate_size)

    # Corpora

    @property
    def corpus_tokens(self) -> int | None:
        """Tokens that drafts are made from, external corpora included; None without a corpus."""
        corpus = self.worker.draft_corpus
        return None if corpus is None else corpus.num_tokens

    @exclusive
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
        """Load a corpus to draft from, from exactly one source; its name.

        Args:
            name: not that of another, unless it failed; default: a random one.
            documents: texts. As a file's texts, they are encoded as they stand, without special
                tokens, since drafts continue running text.
            token_chunks: token ids, a sequence per document.
            file_path: JSONL, per line a JSON string or an object with ``text``.
            publish: ``when_ready``, or ``on_request``: by `publish_external_corpus` alone.
            wait: return when it is published, or ready where that is on request, and raise
                InvalidInputError if it could not be loaded, its name being free again. Else
                `external_corpora` says how far it is.

        A document that cannot be used, or a limit exceeded, fails the whole load: none of the
        documents is drafted from. They must not be changed while they load. Raises
        InvalidInputError.
        """
        return self.corpora.add_external_corpus(
            name,
            documents=documents,
            token_chunks=token_chunks,
            file_path=file_path,
            publish=publish,
            wait=wait,
        )

    @exclusive
    def remove_external_corpus(self, name: str) -> None:
        """Forget an external corpus, or cancel its load. Raises InvalidInputError if unknown."""
        self.corpora.remove_external_corpus(name)

    @exclusive
    def publish_external_corpus(self, name: str) -> None:
        """Draft from an external corpus from the next step on; does nothing where it is published.

        Raises InvalidInputError where it is unknown, loading or failed.
        """
        self.corpora.publish_external_corpus(name)

    @exclusive
    def external_corpora(self) -> list[ExternalCorpus]:
        """All external corpora by name; publishes those that are ready and wait for no request."""
        return self.corpora.external_corpora()

    @exclusive
    def wait_for_external_corpora(self, timeout: float | None = None) -> list[ExternalCorpus]:
        """Wait until no external corpus loads; returns all of them, failed ones with the reason.

        Raises TimeoutError after ``timeout`` seconds.
        """
        return self.corpora.wait_for_external_corpora(timeout)

    @exclusive
    def share_corpus(self, max_bytes: int = 8 << 20) -> None:
        """Begin to exchange what is committed with other engines of the same model.

        Requests that run are shared whole, ended ones are not. Off until it is called.

        Args:
            max_bytes: bound on the tokens that wait to be taken, and on those that wait to be
                learned. Beyond it whole rollouts are left out, the oldest first, and counted.

        Raises InvalidInputError the second time.
        """
        self.corpora.share_corpus(max_bytes)

    @exclusive
    def take_corpus_delta(self) -> CorpusDelta:
        """The tokens this engine's own requests committed since the last delta, each once.

        Raises InvalidInputError before `share_corpus`.
        """
        return self.corpora.take_corpus_delta()

    @exclusive
    def learn_corpus_deltas(self, deltas: Sequence[CorpusDelta]) -> None:
        """Take in what other engines committed, as if it had been rolled out here.

        One sender's deltas come in the order in which they were taken, deltas of several senders in
        any order; the engine's own are passed over. The next steps feed the corpus, each a bounded
        number of tokens. Raises InvalidInputError, also before `share_corpus`.
        """
        self.corpora.learn_corpus_deltas(deltas)

    @exclusive
    def save_corpus(self, path: str | os.PathLike[str]) -> None:
        """Write rollouts, published external corpora, calibration and weight version to a file.

        The file, for a trainer's checkpoint, is written whole or not at all. The lengths of
        rollouts go into ``<path>.learned.json``. Raises OSError, and InvalidInputError where
        ``path`` is a folder or a device.
        """
        self.corpora.save_corpus(path)

    @exclusive
    def load_corpus(self, path: str | os.PathLike[str]) -> None:
        """Go on with the corpus that `save_corpus` wrote, in place of the one held.

        Bring the engine to the weights and weight version of the checkpoint first: rollouts of
        another version count as those of an older policy. External corpora that are loading go on
        and replace the file's of the same name, as configured ones do. Before the first step the
        latter have not begun, so that the file finds the room it was saved from.

        Raises InvalidInputError for a file that is damaged, of another vocabulary or of another
        ``spec.corpus_bytes``, OSError for one that cannot be read; the corpus is as it was then.
        Trouble with the file beside it is logged and left at that.
        """
        self.corpora.load_corpus(path)

    @exclusive
    def learned(self) -> dict[str, Any]:
        """The learned costs of steps and worth of drafts, JSON-able: the cost curve, calibration,
        ..."""
        return self.corpora.learned()
