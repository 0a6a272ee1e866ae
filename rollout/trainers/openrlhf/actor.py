"""One engine behind the methods OpenRLHF calls on its vLLM Ray actors."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from rollout.errors import InvalidInputError, RolloutError
from rollout.sampling.seeds import derive_seed
from rollout.trainers.openrlhf.options import ActorSettings
from rollout.trainers.openrlhf.sample import Sample, SampleSeeds
from rollout.trainers.openrlhf.sampling import RequestOutput, engine_params, request_output
from rollout.trainers.openrlhf.weight_sync import ParameterReceiver
from rollout.trainers.served_engine import ServedEngine
from rollout.types import FinishReason, Rollout

_TAGS = ("weights", "kv_cache")


class RolloutActor:
    """The methods of `openrlhf.trainer.ray.vllm_engine.RolloutRayActor`, under their names.

    All are called on the actor's event loop; the engine runs on a thread of its own.
    """

    def __init__(self, settings: ActorSettings, make_executor: Callable[[], Any]) -> None:
        self._executor = make_executor()
        engine = settings.make_engine()
        self._eos_token_ids = frozenset(engine.eos_token_ids)
        if engine.encoder.tokenizer is None:
            raise InvalidInputError(
                "--actor.model_name_or_path", settings.model, "has no tokenizer"
            )
        self._tokenizer = copy.deepcopy(engine.encoder.tokenizer)  # one is not for two threads
        self._engine = ServedEngine(engine)
        self._seeds = SampleSeeds(settings.seed, settings.resumed_from)
        options = settings.options
        self._weights = ParameterReceiver(
            self._engine, timeout=options.sync_timeout, keep_kv=options.keep_kv
        )

    # Generation

    async def generate_responses(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """``num_samples`` trajectories of one prompt."""
        if images:
            raise InvalidInputError("images", images, "are not implemented")
        seed = self._seeds.next_samples(prompt)

        async def one(index: int) -> dict[str, Any]:
            sample = Sample(self._generate, derive_seed(seed, 0, index))
            response = await self._executor.execute(
                prompt=prompt,
                label=label,
                sampling_params=copy.deepcopy(sampling_params),  # executors may write to theirs
                max_length=max_length,
                hf_tokenizer=hf_tokenizer,
                llm_engine=sample,
                images=images,
            )
            response["extra_logs"] = {**(response.get("extra_logs") or {}), **sample.metrics()}
            return response

        return await asyncio.gather(*(one(index) for index in range(num_samples)))

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: object = None
    ) -> RequestOutput:
        """One continuation, outside of a trajectory."""
        seed = self._seeds.next_samples(str(list(prompt_token_ids)))
        return await Sample(self._generate, seed).generate(
            prompt_token_ids, sampling_params, multi_modal_data
        )

    async def _generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, request_seed: int
    ) -> tuple[RequestOutput, Rollout]:
        self._engine.require_weights()
        params = engine_params(sampling_params)
        rollout = await self._engine.generate(prompt_token_ids, params, request_seed=request_seed)
        self._engine.require_weights()
        if rollout.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            why = rollout.error or "it was aborted"
            raise RolloutError(f"a request ended after {len(rollout.token_ids)} tokens: {why}")
        skip = sampling_params.skip_special_tokens
        output = request_output(
            rollout,
            lambda ids: self._tokenizer.decode(list(ids), skip_special_tokens=skip),
            stop_token_ids=self._eos_token_ids | set(params.stop_token_ids),
            stop=params.stop,
            with_logprobs=sampling_params.logprobs is not None,
        )
        return output, rollout

    def get_num_unfinished_requests(self) -> int:
        return self._engine.loop.num_unfinished

    async def pause_generation(self) -> None:
        """Requests in flight stay where they are, and go on after `resume_generation`."""
        await self._engine.call(lambda engine: engine.pause_generation("in_place"))

    async def resume_generation(self) -> None:
        """End the pause."""
        await self._engine.call(lambda engine: engine.continue_generation())

    # Weights

    async def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        use_ray: bool,
    ) -> None:
        """Meet the trainer's rank 0, as OpenRLHF's own vLLM workers do: each rank of the engine."""
        if use_ray:
            raise InvalidInputError("--vllm.sync_with_ray", use_ray, "is not implemented")
        await self._weights.join(master_address, master_port, rank_offset, world_size, backend)

    async def update_weight(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False
    ) -> None:
        """Take one parameter of an update; ``empty_cache`` comes with the last one."""
        await self._weights.receive(name, dtype, shape, is_last=empty_cache)

    async def update_weight_cuda_ipc(self, *args: object, **kwargs: object) -> NoReturn:
        """Not implemented; the launcher refuses the arguments that lead here."""
        raise InvalidInputError("update_weight_cuda_ipc", "", "give --vllm.sync_backend gloo")

    async def reset_prefix_cache(self) -> None:
        """Nothing to do: OpenRLHF asks before an update, and an update drops it."""

    # Memory

    async def sleep(self, level: int = 1) -> None:
        """Give memory back. Level 1 keeps the weights for `wake_up`; after 2 an update is due."""
        await self._engine.release(_TAGS, keep_weights=level == 1)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """``tags``: of ``weights`` and ``kv_cache``; None: both."""
        await self._engine.resume(_TAGS if tags is None else tags)

    def close(self) -> None:
        """Abort what runs and end the engine."""
        self._engine.close()
