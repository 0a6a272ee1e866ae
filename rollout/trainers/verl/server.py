"""The server of one replica: an engine on its loop, as a Ray actor whose methods verl calls.

Where the model is on several ranks, the actor's process is rank 0 and starts the others.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import TokenOutput

from rollout.engine.engine import RolloutEngine
from rollout.engine.metrics import EngineMetrics
from rollout.engine.rank_processes import open_on_ranks
from rollout.engine.tokenizer import prompt_group
from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.trainers.served_engine import ServedEngine
from rollout.trainers.verl.options import NAME, OWN, ServerOptions, server_options
from rollout.trainers.verl.sampling import RequestStart, engine_params
from rollout.types import FinishReason, Rollout

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


def options_of(config: Any, model_config: Any, *, standalone: bool) -> ServerOptions:
    """A server's options from verl's configuration objects, as a replica gets them.

    Raises InvalidInputError for whatever cannot be honoured, naming it.
    """
    rollout = omega_conf_to_dataclass(config)
    model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
    own = rollout.engine_kwargs.get(NAME) or {}
    if isinstance(own, DictConfig):
        own = OmegaConf.to_container(own, resolve=True)
    if not isinstance(own, Mapping):
        raise InvalidInputError(OWN, own, "must be a mapping")
    return server_options(rollout, model, own, standalone=standalone)


class Server:
    """A server of verl's requests. Between `abort_all_requests` and `resume_generation` requests
    wait, or are sent back."""

    def __init__(
        self, config: Any, model_config: Any, *, replica_rank: int, standalone: bool, seeds: Any
    ) -> None:
        """``seeds``: the handle of the run's one `RequestSeeds`."""
        self._options = options_of(config, model_config, standalone=standalone)
        self._replica_rank = replica_rank
        self._standalone = standalone
        self._seeds = seeds
        self._sends_back = False
        self._step = 0  # the trainer's, of the weights in use
        self._step_of = {0: 0}  # the engine's weight versions -> the trainer's steps

    async def launch(self) -> None:
        """Read the model; then requests are taken."""
        self._engine = ServedEngine(await asyncio.to_thread(self._make_engine))
        if self._options.weights_come_first:
            self._engine.refusal = "none have come yet; load_format=auto serves the checkpoint's"
        self._max_context_len = await self._engine.call(lambda engine: engine.max_context_len)

    def _make_engine(self) -> RolloutEngine:
        options = self._options
        engine = open_on_ranks(options.engine_config(), options.worker_factory())
        if options.weights_come_first:
            engine.release_memory(("weights",), keep_weights=False)
            engine.resume_memory(("weights",))
        return engine

    # Requests

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        **others: Any,
    ) -> TokenOutput:
        """One response. Raises InvalidInputError, and RolloutError where the model broke."""
        media = {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
        for name, value in (media | others).items():
            if value is not None:
                raise InvalidInputError(name, type(value).__name__, "specrollout serves text alone")
        if self._sends_back:
            return self._sent_back()
        self._engine.require_weights()
        tokens = normalize_token_ids(prompt_ids)
        start = await self._seeds.start.remote(prompt_group(tokens), len(tokens), self._step)
        params, wants_logprobs = engine_params(
            sampling_params,
            prompt_len=start.prompt_len,
            partial_len=len(tokens) - start.prompt_len,
            max_context_len=self._max_context_len,
            limits=self._options.limits,
            ignore_eos=self._options.ignore_eos,
            stop_token_ids=self._options.stop_token_ids,
            raw_logprobs=self._options.raw_logprobs,
            routed_experts=self._options.routed_experts,
        )
        if self._sends_back:  # meanwhile
            await self._remember(tokens, start)
            return self._sent_back()
        rollout = await self._engine.generate(
            tokens[: start.prompt_len],
            params,
            request_seed=start.seed,
            partial_ids=tokens[start.prompt_len :],
        )
        if rollout.finish_reason is FinishReason.ERROR:
            raise RolloutError(f"request {request_id} broke off: {rollout.error}")
        if rollout.finish_reason is FinishReason.ABORT:
            self._engine.require_weights()
            await self._remember([*tokens, *rollout.token_ids], start)
        return self._output(rollout, wants_logprobs)

    async def _remember(self, tokens: list[int], start: RequestStart) -> None:
        """Remember a cut request's start, so that it goes on as if never cut when it comes back to
        any replica."""
        await self._seeds.cut.remote(prompt_group(tokens), start)

    def _output(self, rollout: Rollout, wants_logprobs: bool) -> TokenOutput:
        stats = rollout.stats
        raw = self._options.raw_logprobs
        logprobs = rollout.extras.raw_logprobs if raw else rollout.logprobs
        steps = [self._step_of[version] for version in rollout.weight_versions] or [self._step]
        return TokenOutput(
            token_ids=rollout.token_ids,
            log_probs=logprobs if wants_logprobs else None,
            routed_experts=rollout.routed_experts,
            stop_reason="aborted" if rollout.finish_reason is FinishReason.ABORT else "completed",
            num_preempted=stats.preemptions,
            extra_fields={
                "global_steps": steps[-1],
                "min_global_steps": min(steps),
                "max_global_steps": max(steps),
                "num_cached_tokens": stats.cached_tokens,
                "spec_num_draft_tokens": stats.drafted,
                "spec_num_accepted_tokens": stats.accepted,
                "spec_num_verify_steps": stats.verify_steps,
            },
        )

    def _sent_back(self) -> TokenOutput:
        """The client asks again, wherever the load balancer sends it then."""
        return TokenOutput(
            token_ids=[],
            log_probs=[],
            stop_reason="aborted",
            extra_fields={"global_steps": self._step},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End what runs and waits with what it has; nothing runs until `resume_generation`.

        ``reject_request``: those that come meanwhile are sent back instead of kept waiting.
        """
        self._sends_back = reject_request
        aborted = self._engine.loop.num_unfinished
        await self._engine.call(lambda engine: engine.pause_generation("abort"))
        if aborted:
            logger.info("replica %d: cut %d requests", self._replica_rank, aborted)
        return {"aborted_count": aborted, "request_ids": []}

    async def resume_generation(self) -> None:
        self._sends_back = False
        await self._engine.call(lambda engine: engine.continue_generation())

    async def metrics(self) -> EngineMetrics:
        """The engine's totals, for the trainer's log."""
        return await self._engine.call(lambda engine: copy.copy(engine.metrics()))

    # Weights

    async def begin_weight_update(self, lora_scaling: float | None = None) -> None:
        """``lora_scaling``: of LoRA adapters that come without their weights.

        Raises WeightUpdateError while another update is under way.
        """
        options: dict[str, Any] = {} if lora_scaling is None else {"lora_scaling": lora_scaling}
        await self._engine.call(lambda engine: engine.begin_weight_update(**options))

    async def load_weights(self, handle: dict[str, Any]) -> None:
        """``handle``: of a bucket of a `SharedMemorySender` or a `CudaIpcSender`.

        Raises WeightUpdateError also where an earlier bucket of the update has failed.
        """

        def load(engine: RolloutEngine) -> None:
            if not engine.worker.weights.is_under_way:
                raise WeightUpdateError("no update is open: an earlier bucket has ended it")
            engine.update_weights_from_ipc(handle)

        await self._engine.update(load)

    async def end_weight_update(self, global_steps: int | None) -> None:
        """Serve the new weights, of trainer step ``global_steps``; None: of the step before."""
        step = self._step if global_steps is None else global_steps
        version = await self._engine.call(lambda engine: engine.weight_version)
        self._step_of[version + 1] = step  # known before the first token of that version
        await self._engine.update(lambda engine: engine.end_weight_update())
        self._engine.refusal = ""
        await self.set_global_steps(step)

    async def abandon_weight_update(self, reason: str) -> None:
        await self._engine.call(lambda engine: engine.abandon_weight_update(reason))
        await self._engine.refuse_if_torn()

    async def set_global_steps(self, global_steps: int) -> None:
        self._step = global_steps
        version = await self._engine.call(lambda engine: engine.weight_version)
        self._step_of[version] = global_steps

    # Memory. A standalone server has its device to itself, and stays awake.

    async def sleep(self) -> None:
        """Give weights and KV cache back while the trainer steps."""
        if not self._standalone:
            await self._release("kv_cache", "weights")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """``tags``: weights, kv_cache; None: both."""
        if not self._standalone:
            await self._resume(*(tags or ("weights", "kv_cache")))

    async def release_kv_cache(self) -> None:
        await self._release("kv_cache")

    async def resume_kv_cache(self) -> None:
        await self._resume("kv_cache")

    async def _release(self, *tags: str) -> None:
        if self._options.frees_memory:
            await self._engine.release(tags, keep_weights=self._options.keeps_weights)

    async def _resume(self, *tags: str) -> None:
        if self._options.frees_memory:
            await self._engine.resume(tags)

    async def clear_kv_cache(self) -> None:
        """Drop the prefix cache. The corpus stays."""
        await self._engine.call(lambda engine: engine.flush_cache())

    # Profiling is refused at start; verl calls these all the same.

    async def start_profile(self, **kwargs: Any) -> None:
        pass

    async def stop_profile(self) -> None:
        pass
