"""The rollout engine: requests in, rollouts out.

`RolloutEngine` is the one door to its parts, and holds the guard that lets one thread at a time
through: `Generation`, `EngineWeights`, `Lifecycle` and `Corpora`, which share a `StepRunner`.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, Never

import torch

from rollout.config import EngineConfig, ParallelConfig, engine_config
from rollout.engine.call_guard import CallGuard, exclusive
from rollout.engine.corpora import Corpora
from rollout.engine.empty_outputs import EmptyOutputs
from rollout.engine.generation import Generation
from rollout.engine.lifecycle import Lifecycle
from rollout.engine.metrics import EngineMetrics, EngineStatus, StepMetrics
from rollout.engine.protocol import P, Part, T, part_call
from rollout.engine.requests import RequestFactory
from rollout.engine.step_runner import StepRunner
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
from rollout.types import MemoryTag, Prompt, Request, Rollout, SamplingParams
from rollout.validation import checked_int, checked_path
from rollout.weights.bucket import PackedBucket
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.source import WeightSource
from rollout.weights.update_calls import UpdateCalls
from rollout.weights.update_counts import UpdateCounts


def _call(part: str, method: Callable[Concatenate[Part, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A call that a part answers, behind the engine's guard."""
    return exclusive(part_call(part, method))


class RolloutEngine(UpdateCalls):
    """Generates rollouts of one model.

    One thread at a time calls it: a call while another thread is in one raises EngineStateError and
    does nothing. `EngineLoop` is for many threads. Counters (`metrics`, `last_step`),
    `unavailable_reason` and other properties may be read at any time.
    """

    def __init__(self, config: EngineConfig, worker: Worker) -> None:
        # With several ranks an interrupt must end the others' waiting at once: see `all_or_none`.
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
        worker.calibrate()

    @classmethod
    def from_config(
        cls, config: EngineConfig, factory: WorkerFactory, progress: Progress | None = None
    ) -> RolloutEngine:
        """Build the worker by its factory. ``progress`` is told how far the model's weights are
        read."""
        worker = factory(config, progress)
        with worker.ranks.all_or_none("while it started"):
            check_alike(worker.ranks.all, shared_settings(factory, worker))
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
                fields; default: one process.
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

    generate = _call("generation", Generation.generate)
    stream = part_call("generation", Generation.stream)
    score = _call("generation", Generation.score)
    score_with_extras = _call("generation", Generation.score_with_extras)

    # One step at a time, for servers

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar that parameters name, if they do, which may take seconds: `submit`
        then need not. May be called on any thread, beside other calls. Raises InvalidInputError."""
        self.requests.grammars.compile(params)

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

    any_rank_has_unfinished = _call("generation", Generation.any_rank_has_unfinished)

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

    pause_generation = _call("lifecycle", Lifecycle.pause_generation)
    continue_generation = _call("lifecycle", Lifecycle.continue_generation)
    release_memory = _call("lifecycle", Lifecycle.release_memory)
    resume_memory = _call("lifecycle", Lifecycle.resume_memory)

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
        self.weights.receiver.begin(manifest, options)

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
        self.weights.receiver.abandon(reason)

    @exclusive
    def decline_weights(self, source: WeightSource, reason: str) -> None:
        """Tell the sender of a `GroupSource` that nothing of what it announced will be taken."""
        self.weights.receiver.decline(source, reason)

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
        sender: str = "specrollout",
    ) -> None:
        """Join a group that weights come through, at rank ``rank_offset`` (the sender is rank 0).

        Ranks that run one model join it one after the other from ``rank_offset`` on, and count each
        in ``world_size``.

        ``sender``: what made rank 0's group. ``specrollout``: a `WeightGroup`. ``torch``: a trainer
        written for other engines, by torch's own rendezvous at that address; it broadcasts each
        tensor by itself.

        Waits for all ``world_size`` members. Raises WeightUpdateError, naming ranks, where some are
        missing after ``timeout`` seconds or were told another size. An update through it that says
        no timeout of its own waits as long.
        """
        self.weights.receiver.init_group(
            master_address, master_port, rank_offset, world_size, group_name, backend, timeout,
            sender,
        )  # fmt: skip

    @exclusive
    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """Leave a group. Raises InvalidInputError for one this engine is not in."""
        self.weights.receiver.destroy_group(group_name)

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
        return self.worker.weights.digest(selector)

    @exclusive
    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[float]:
        """The first values of a tensor, flattened. Raises InvalidInputError for an unknown name."""
        return self.weights.first_values(name, truncate_size)

    # Corpora

    @property
    def corpus_tokens(self) -> int | None:
        """Tokens that drafts are made from, external corpora included; None without a corpus."""
        corpus = self.worker.draft_corpus
        return None if corpus is None else corpus.num_tokens

    add_external_corpus = _call("corpora", Corpora.add_external_corpus)
    remove_external_corpus = _call("corpora", Corpora.remove_external_corpus)
    publish_external_corpus = _call("corpora", Corpora.publish_external_corpus)
    external_corpora = _call("corpora", Corpora.external_corpora)
    wait_for_external_corpora = _call("corpora", Corpora.wait_for_external_corpora)
    share_corpus = _call("corpora", Corpora.share_corpus)
    take_corpus_delta = _call("corpora", Corpora.take_corpus_delta)
    learn_corpus_deltas = _call("corpora", Corpora.learn_corpus_deltas)
    save_corpus = _call("corpora", Corpora.save_corpus)
    load_corpus = _call("corpora", Corpora.load_corpus)
    learned = _call("corpora", Corpora.learned)
