"""Rollouts for TRL's asynchronous trainer: `AsyncGRPOTrainer(rollout_worker=...)`."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

from rollout.engine.engine_loop import EngineLoop
from rollout.errors import EngineStateError, InvalidInputError, RolloutError
from rollout.sampling.seeds import derive_seed
from rollout.trainers.trl.sampling import params_of
from rollout.types import FinishReason, SamplingParams

_log = logging.getLogger(__name__)

# Request seeds of the running task's conversation, from its next turn on.
_turn_seeds: ContextVar[Iterator[int]] = ContextVar("turn_seeds")

STOP_TIMEOUT = 60.0  # seconds for rewards and tools that are being computed


class RolloutWorker:
    """Keeps an engine of this process busy with a trainer's prompts, and scores what it gives.

    Conversations, tools, environments, rewards and advantages are TRL's own code, the part of its
    worker that runs in asyncio; in place of requests to a vLLM server it awaits the engine.

    Args:
        loop: drives the engine. It stays its maker's, who closes it.
        args: the trainer's AsyncGRPOConfig, the same object.
        dataset, reward_funcs, processing_class, tools, environment_factory: those of the trainer;
            with a worker of one's own it looks at none of them.
        first_row: how many rows, over all epochs, were before the one to begin with; TRL does not
            say, when a run is resumed. Seeds derive from the row, the sample and the turn.

    Raises InvalidInputError for an option that cannot be honoured.
    """

    def __init__(
        self,
        loop: EngineLoop,
        args: Any,
        dataset: Any,
        reward_funcs: Callable[..., Any] | list[Callable[..., Any]],
        processing_class: Any,
        *,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        first_row: int = 0,
    ) -> None:
        if args.token_budget is None:
            raise InvalidInputError(
                "token_budget", None, "must be given (or -1): there is no vLLM server to ask"
            )
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=4096)
        self._engine_loop = loop
        self._args = args
        declared = loop.call(lambda engine: engine.eos_token_ids).result()
        eos = list(dict.fromkeys([processing_class.eos_token_id, *declared]))
        self._params = params_of(args, eos)
        self._options = {
            "model_name": "specrollout",
            "dataset": dataset,
            "reward_funcs": reward_funcs if isinstance(reward_funcs, list) else [reward_funcs],
            "processing_class": processing_class,
            "eos_token_ids": eos,
            "tools": tools,
            "environment_factory": environment_factory,
            "first_row": first_row,
        }
        self._version = _Shared(0)
        self._heartbeat = _Heartbeat()
        self._failed = threading.Event()
        self._failure: queue.Queue[tuple[str, str, str]] = queue.Queue(maxsize=1)
        self._running: _GenerationLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Generate until `stop`."""
        args = self._args
        if args.max_inflight_tasks < 1:
            raise InvalidInputError(
                "max_inflight_tasks",
                args.max_inflight_tasks,
                "is what the trainer makes of it; hand the worker the trainer's own args",
            )
        self._running = _GenerationLoop(
            self._engine_loop,
            self._params,
            run_seed=args.seed,
            **self._options,
            rollout_buffer=self.rollout_buffer,
            metrics_queue=self.metrics_queue,
            model_version_value=self._version,
            heartbeat_value=self._heartbeat,
            failed_event=self._failed,
            exception_info_queue=self._failure,
            num_generations=args.num_generations,
            max_inflight_tasks=args.max_inflight_tasks,
            queue_maxsize=args.queue_maxsize,
            chat_template_kwargs=args.chat_template_kwargs,
            max_tool_calling_iterations=args.max_tool_calling_iterations,
            log_completions=args.log_completions,
            num_completions_to_print=args.num_completions_to_print,
            fork_threshold_tokens=args.fork_threshold_tokens,
        )
        self._heartbeat.value = 0.0
        self._thread = threading.Thread(target=self._run, name="trl-rollouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._running is not None
        with suppress(Exception):  # it is kept, and raised by check_health
            self._running.run()

    def stop(self) -> None:
        """Abort what is in flight and end the thread. Raises TimeoutError when it does not end."""
        if self._running is None or self._thread is None:
            return
        self._running.stop()
        self._thread.join(STOP_TIMEOUT)
        if self._thread.is_alive():
            raise TimeoutError(f"a reward function or tool is still running after {STOP_TIMEOUT} s")
        self._running = self._thread = None
        # The aborts are asked: the engine's loop has done them once it comes to this.
        with suppress(EngineStateError):  # closed or broken: nothing is left in it
            self._engine_loop.call(lambda engine: None).result()

    def update_model_version(self, model_version: int) -> None:
        """Groups begun from now on are this version's."""
        self._version.value = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises RuntimeError when the worker has failed, or said nothing for so many seconds."""
        if self._failed.is_set():
            kind, message, trace = self._failure.queue[0]
            raise RuntimeError(f"the rollout worker failed: {kind}: {message}\n{trace}")
        age = self._heartbeat.age
        if age > stale_after_s:
            raise RuntimeError(f"the rollout worker has said nothing for {age:.0f} s")


@dataclass(slots=True)
class _Shared:
    """A value that TRL's loop takes for a multiprocessing.Value; here it is shared by threads."""

    value: float


class _Heartbeat:
    """The time since TRL's loop last said that it is alive. TRL writes the time of day; ``age``
    goes by a clock that nobody sets."""

    def __init__(self) -> None:
        self._beat = time.monotonic()

    def _note(self, value: float) -> None:
        self._beat = time.monotonic()

    value = property(fset=_note)

    @property
    def age(self) -> float:
        return time.monotonic() - self._beat


class _GenerationLoop(_AsyncRolloutLoop):  # type: ignore[misc]  # trl is untyped here
    """TRL's loop, awaiting the engine where that one posts to a server."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        params: SamplingParams,
        *,
        run_seed: int,
        first_row: int,
        **options: Any,
    ) -> None:
        super().__init__(dataset_start_index=first_row, **options)
        self._engine_loop = engine_loop
        self._params = params
        self._run_seed = run_seed
        self._first_row = first_row
        self._num_begun: Counter[int] = Counter()  # conversations, by group

    def stop(self) -> None:
        """End the loop. May be called from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_event.set)

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        loops = {
            asyncio.create_task(self._generate_loop(stop_event=stop_event)),
            asyncio.create_task(self._score_loop(stop_event=stop_event)),
        }
        stopped = asyncio.create_task(stop_event.wait())
        ended, running = await asyncio.wait({*loops, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in running:  # what is in flight is aborted
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in ended:
            task.result()

    async def _generate_one(self, *args: Any, group_id: int, **options: Any) -> Any:
        # A group's conversations are begun in their order, so the count is the sample's number.
        sample = self._num_begun[group_id]
        self._num_begun[group_id] += 1
        if self._num_begun[group_id] == self.num_generations:
            del self._num_begun[group_id]
        seed = derive_seed(self._run_seed, self._first_row + group_id, sample)
        _turn_seeds.set(derive_seed(seed, turn, 0) for turn in count())
        return await super()._generate_one(*args, group_id=group_id, **options)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        seed = next(_turn_seeds.get())
        handle = self._engine_loop.submit(prompt_ids, self._params, request_seed=seed)
        rollout = await asyncio.wrap_future(handle.future)
        if rollout.finish_reason is FinishReason.ERROR:
            _log.warning(
                "a rollout failed after %d tokens: %s", len(rollout.token_ids), rollout.error
            )
        if not rollout.token_ids:  # TRL has no way to leave a conversation out
            raise RolloutError(f"a rollout failed before its first token: {rollout.error}")
        self._rate(
            "rollout/accept_length",
            rollout.stats.verify_steps + rollout.stats.accepted,
            rollout.stats.verify_steps,
        )
        self._rate("rollout/weight_versions_mean", len(rollout.weight_version_spans), 1)
        return rollout.token_ids, rollout.logprobs

    def _rate(self, name: str, numerator: float, denominator: float) -> None:
        """Add to a rate that goes out with the next metrics, summed over rollouts."""
        sums = self._rates[name]
        sums[0] += numerator
        sums[1] += denominator
