"""The async API over one engine: admission, limits, shutdown."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from rollout.engine.engine_loop import EngineLoop, OnTokens, RequestHandle
from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError, OutOfMemoryError, PromptTooLongError
from rollout.hub import hub_name
from rollout.sampling.seeds import derive_seed
from rollout.server.body_fields import check_params
from rollout.server.config import ServeConfig
from rollout.server.errors import DrainingError, ModelNotFoundError, QueueFullError
from rollout.server.http_metrics import HttpMetrics
from rollout.server.http_weight_update import HttpWeightUpdate
from rollout.server.status import StatusCache
from rollout.server.streams import DeltaStream, SampleRequest, call_soon
from rollout.types import Prompt, Rollout, SamplingParams, TokenExtras

T = TypeVar("T")

_ANY_MODEL = frozenset({"", "default", "unknown"})
"""Names that gateways and clients send where they were told none."""

_POLL_SECONDS = 0.02  # of waits that nothing ends but looking again


class Serving:
    """One engine for many clients, used on one event loop; only `call` touches the engine."""

    def __init__(self, engine: Engine, config: ServeConfig) -> None:
        """Raises InvalidInputError for an engine in lockstep."""
        self.serve_config = config
        self.config = config.server
        self.encoder = engine.encoder
        self._compile_grammar = engine.compile_grammar
        self.vocab_size = engine.vocab_size
        self.max_running, self.limits = engine.max_running, engine.limits
        self.max_context_len = engine.max_context_len
        self.num_replicas = config.cluster.replicas
        self.model_path = config.model.path
        on_hub = (hub_name(self.model_path) or "").partition("@")[0]
        self.model_name = self.config.model_name or on_hub or Path(self.model_path).resolve().name
        self.started = time.time()
        self._began = time.monotonic()
        self.seed = secrets.randbits(63) if self.config.seed is None else self.config.seed
        self.is_draining = False
        self._is_hurried = False
        self._requests = count()  # that brought no seed
        self._scoring = 0
        self._named: dict[str, set[RequestHandle]] = {}  # unfinished, by rid
        if self.encoder.tokenizer is not None:  # prompts are encoded here, rollouts on its thread
            self.encoder.prepare_for_threads("tokenizer", config.model.tokenizer)
        self.http_metrics = HttpMetrics()
        self.status_cache = StatusCache(engine.status(), self.call)
        self.open_update = HttpWeightUpdate()  # touched on the engine's thread alone
        self.loop = EngineLoop(engine)

    # Before a request is queued

    def require_model(self, name: str | None, *, any_weights: bool = False) -> None:
        """Raises ModelNotFoundError unless ``name`` is the served model's.

        That is its name, with an organisation's before it or without, and the path that the server
        was started with; while a LoRA adapter is loaded, that one's alone, unless ``any_weights``
        would do. None and what gateways send for it ask for no other.
        """
        if name is None or name in _ANY_MODEL:
            return
        if (adapter := self.open_update.adapter_name) is not None:
            if name == adapter:
                return
            if not any_weights:
                raise ModelNotFoundError(
                    f"the model {name!r} is not served while the adapter {adapter!r} is loaded"
                )
        if name == self.model_path:
            return
        if name.rpartition("/")[2] != self.model_name.rpartition("/")[2]:
            raise ModelNotFoundError(
                f"the model {name!r} does not exist: this server has {self.model_name!r}"
            )

    def fresh_seed(self) -> int:
        """A seed in [0, 2**63) for a request that brings none: another one each time."""
        return derive_seed(self.seed, next(self._requests), 0) >> 1

    async def encode(
        self, prompts: Sequence[Prompt], field: str = "prompt", *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Checked token ids of each prompt, none of them too long; off the event loop.

        Raises InvalidInputError naming ``field``.
        """

        def encode_all() -> list[list[int]]:
            names = [f"{field}[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else [field]
            encode = partial(
                self.encoder.encode,
                max_tokens=self.max_prompt_len,
                add_special_tokens=add_special_tokens,
            )
            return [encode(prompt, name) for prompt, name in zip(prompts, names, strict=True)]

        for prompt in prompts:
            if not isinstance(prompt, str) and len(prompt) > self.max_prompt_len:
                self.check_prompt_len(len(prompt))
        all_ids = await asyncio.to_thread(encode_all)
        for ids in all_ids:
            self.check_prompt_len(len(ids))
        return all_ids

    def require_batch(self, count: int, field: str = "batch") -> None:
        """Raises InvalidInputError where one call asks for too many samples, or none."""
        if not 0 < count <= self.config.max_batch:
            raise InvalidInputError(
                field, count, f"one call may ask for 1 to {self.config.max_batch} samples"
            )

    def check(self, samples: Sequence[SampleRequest]) -> None:
        """Raises InvalidInputError for samples that can never run; nothing is queued."""
        self.require_batch(len(samples))
        for sample in samples:
            self.check_prompt_len(len(sample.prompt_ids))
        for params in {id(sample.params): sample.params for sample in samples}.values():
            check_params(params, self.vocab_size, self.encoder.tokenizer is not None)

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt in tokens: the configured limit, at most the context less one
        token."""
        most, configured = self.max_context_len - 1, self.config.max_prompt_len
        return most if configured is None else min(most, configured)

    def check_prompt_len(self, length: int) -> None:
        """Raises InvalidInputError for a prompt that is empty or too long."""
        if length > self.max_prompt_len:
            raise PromptTooLongError.of_length(length, self.max_prompt_len)
        if length <= 0:
            raise InvalidInputError(
                "len(prompt)", length, f"must be 1 to {self.max_prompt_len} tokens"
            )

    async def prepare(self, samples: Sequence[SampleRequest]) -> None:
        """Compile the samples' grammars and patterns, off the event loop and the engine's thread.

        Raises InvalidInputError, QueueFullError or DrainingError where the samples are refused.
        """
        compiled = {
            (params.json_schema, params.regex, params.ebnf, *params.stop_regex): params
            for params in (sample.params for sample in samples)
            if params.has_grammar or params.stop_regex
        }
        if compiled:
            self._admit(len(samples))
            self.check(samples)
        for params in compiled.values():
            await asyncio.to_thread(self._compile_grammar, params)

    # Generating

    async def generate(self, samples: Sequence[SampleRequest]) -> list[Rollout]:
        """The samples' rollouts, in order. Cancelling aborts unfinished samples.

        Raises InvalidInputError, QueueFullError or DrainingError before anything is queued,
        EngineStateError when the engine has failed.
        """
        await self.prepare(samples)
        handles = self._submit(samples, [None] * len(samples))
        try:
            return await asyncio.gather(*(asyncio.wrap_future(each.future) for each in handles))
        finally:
            for handle in handles:
                handle.future.cancel()  # which aborts it; does nothing to one that has ended

    def stream(self, samples: Sequence[SampleRequest]) -> DeltaStream:
        """The samples' tokens as they come. Closing early aborts unfinished samples.

        `prepare` comes first, so that the engine need not wait for grammars to be compiled.
        Queued, or refused as `generate` does, when this returns.
        """
        stream = DeltaStream()
        handles = self._submit(samples, [stream.listener(i) for i in range(len(samples))])
        for index, handle in enumerate(handles):
            stream.watch(index, handle)
        return stream

    async def score(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
    ) -> tuple[list[float], TokenExtras]:
        """Logprobs of given tokens; see `RolloutEngine.score_with_extras`.

        Waits while the engine cannot run, and for room beside what runs. Raises as `generate` does.
        """
        self._admit(1)
        self.check_prompt_len(len(prompt_ids) + len(output_ids))

        def score(engine: Engine) -> tuple[list[float], TokenExtras] | None:
            if not engine.can_run:
                return None
            try:
                return engine.score_with_extras(prompt_ids, output_ids, params)
            except OutOfMemoryError:
                if not engine.has_unfinished:
                    raise
                return None

        self._scoring += 1
        try:
            while (scored := await self.call(score)) is None:
                await asyncio.sleep(_POLL_SECONDS)
                if self.is_draining:
                    raise DrainingError("the server is shutting down: it scores nothing more")
            return scored
        finally:
            self._scoring -= 1

    def abort(self, rid: str) -> int:
        """Abort the samples named ``rid`` or ``rid_...``, as a batch's are; returns their number.

        They answer with the tokens they have.
        """
        handles = [
            handle
            for name, named in self._named.items()
            if name == rid or name.startswith(f"{rid}_")
            for handle in named
        ]
        for handle in handles:
            handle.abort()
        return len(handles)

    @property
    def uptime(self) -> float:
        """Seconds since the start, by a monotonic clock."""
        return time.monotonic() - self._began

    @property
    def num_unfinished(self) -> int:
        """Samples, running and waiting, of all clients."""
        return self.loop.num_unfinished + self._scoring

    async def told_version(self) -> str:
        """The label of the weights in use, or their number."""
        labels = self.open_update.labels
        return await self.call(lambda engine: labels.of(engine.weight_version))

    async def call(self, function: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self.loop.call(function))

    def _submit(
        self, samples: Sequence[SampleRequest], listeners: Sequence[OnTokens | None]
    ) -> list[RequestHandle]:
        self._admit(len(samples))
        self.check(samples)
        return [
            self._submit_one(sample, listener)
            for sample, listener in zip(samples, listeners, strict=True)
        ]

    def _admit(self, count: int) -> None:
        if self.is_draining:
            raise DrainingError("the server is shutting down: it takes no new requests")
        if self.num_unfinished + count > self.config.max_queue:
            raise QueueFullError(
                f"{self.num_unfinished} samples are running and waiting, and at most "
                f"server.max_queue={self.config.max_queue} may: try again later"
            )

    def _submit_one(self, sample: SampleRequest, listener: OnTokens | None) -> RequestHandle:
        handle = self.loop.submit(
            sample.prompt_ids,
            sample.params,
            request_seed=sample.request_seed,
            prompt_index=sample.prompt_index,
            sample_index=sample.sample_index,
            on_tokens=listener,
        )
        if not sample.is_probe:
            self.http_metrics.watch(handle.future)
        if sample.rid is not None:
            self._name(sample.rid, handle)
        return handle

    def _name(self, rid: str, handle: RequestHandle) -> None:
        event_loop = asyncio.get_running_loop()
        self._named.setdefault(rid, set()).add(handle)

        def forget() -> None:
            self._named[rid].discard(handle)
            if not self._named[rid]:
                del self._named[rid]

        handle.future.add_done_callback(lambda _: call_soon(event_loop, forget))

    # Ending

    async def drain(self) -> None:
        """Refuse new requests, wait up to ``drain_seconds``, then abort what still runs."""
        self.is_draining = True
        deadline = time.monotonic() + self.config.drain_seconds
        while self.num_unfinished and time.monotonic() < deadline and not self._is_hurried:
            await asyncio.sleep(_POLL_SECONDS)
        if self.loop.num_unfinished:
            await asyncio.wrap_future(self.loop.abort_all())

    def end_drain(self) -> None:
        """Abort running requests now; they answer with the tokens they have."""
        self._is_hurried = True

    def close(self) -> None:
        """Abort unfinished requests, end the engine's thread, give the engine back."""
        self.is_draining = True
        self.loop.close()
