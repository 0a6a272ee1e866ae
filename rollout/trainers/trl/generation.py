"""Drop-in replacement for TRL's VLLMGeneration: `use_vllm=True`, without vLLM."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from rollout.engine.following_rank import FollowingRank
from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError
from rollout.open_engine import open_pretrained
from rollout.trainers.trl.colocated import ColocatedEngine, TrlSampleSeeds
from rollout.trainers.trl.engine_options import (
    engine_overrides,
    model_folder,
    rank_overrides,
    require_room_for_each,
    require_servers_own,
    require_supported,
)
from rollout.trainers.trl.metrics import DraftMetrics
from rollout.trainers.trl.sampling import sampling_params
from rollout.trainers.trl.server_engine import ServerEngine, ServerGeneration
from rollout.types import Rollout


class SpecGeneration:
    """Stands in for trl.generation.vllm_generation.VLLMGeneration, whose arguments it takes.

    Arguments after TRL's own come from `specrollout_generation`.
    With ``mode="server"`` the engine is that of a `specrollout serve`. ``group_port`` says nothing
    here, nor does ``trust_remote_code``: no code of a checkpoint is ever run. Arguments that cannot
    be honoured raise InvalidInputError.
    """

    def __init__(
        self,
        model: Any,
        accelerator: Any,
        processing_class: Any,
        mode: str = "colocate",
        structured_outputs_regex: str | None = None,
        server_base_url: str | None = None,
        server_host: str = "0.0.0.0",
        server_port: int = 8000,
        server_timeout: float = 240.0,
        group_port: int = 51216,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        max_model_length: int | None = None,
        max_num_seqs: int | None = None,
        enable_sleep_mode: bool = False,
        model_impl: str = "auto",
        trust_remote_code: bool = False,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float | None = 0.0,
        max_completion_length: int = 16,
        logprobs: int | None = 0,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        spec: str,
        spec_options: dict[str, Any] | None,
        model_path: str | None,
        cluster: str,
        cluster_options: dict[str, Any] | None,
        adapters_only: bool,
        overrides: dict[str, Any],
    ) -> None:
        require_supported(
            accelerator=accelerator,
            processing_class=processing_class,
            mode=mode,
            structured_outputs_regex=structured_outputs_regex,
            model_impl=model_impl,
        )
        self._model = model
        self._with_logprobs = logprobs is not None
        eos_token_ids = _eos_token_ids(model, processing_class)
        self._filler_id = eos_token_ids[0]  # TRL reads the last token of each completion
        own_sampling = generation_kwargs or {}
        self._params = sampling_params(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_completion_length=max_completion_length,
            eos_token_ids=eos_token_ids,
            top_logprobs=logprobs or 0,
            generation_kwargs=own_sampling,
        )
        rank = accelerator.process_index
        run_seed = own_sampling.get("seed")
        if run_seed is None:  # most trainers have seeded torch with their seed plus the rank
            run_seed = torch.initial_seed() - rank
        self._seeds = TrlSampleSeeds(run_seed, rank)
        self.engine: Engine | ServerEngine
        self._generation: ColocatedEngine | ServerGeneration
        if mode == "server":
            require_servers_own(tensor_parallel_size, cluster, overrides)
            host = "127.0.0.1" if server_host == "0.0.0.0" else server_host
            url = server_base_url or f"http://{host}:{server_port}"
            self.engine = self.vllm_client = served = ServerEngine(url, server_timeout)
            self._generation = ServerGeneration(
                served, model, accelerator, adapters_only=adapters_only
            )
        else:
            in_process = cluster == "none"
            if not in_process:
                require_room_for_each(accelerator, cluster_options or {})
            folder = model_path or model_folder(model)
            ranks = rank_overrides(
                tensor_parallel_size,
                folder,
                num_processes=accelerator.num_processes,
                in_process=in_process,
            )
            self.engine = engine = open_pretrained(
                folder,
                spec,
                spec_options=spec_options,
                cluster=cluster,
                cluster_options=cluster_options,
                **engine_overrides(
                    {**ranks, **overrides},
                    model=model,
                    accelerator=accelerator,
                    in_process=in_process,
                    gpu_memory_utilization=gpu_memory_utilization,
                    max_model_length=max_model_length,
                    max_num_seqs=max_num_seqs,
                ),
            )
            self._generation = ColocatedEngine(
                engine, model, sleep=enable_sleep_mode, adapters_only=adapters_only
            )
        self._metrics = DraftMetrics(
            None if isinstance(self.engine, ServerEngine | FollowingRank) else self.engine
        )
        self._num_syncs = 0
        self.trainer: Any = None  # whose log gets the metrics; set when it takes this over
        # Where TRL's tool loop looks up how long a conversation may become.
        limit = self.engine.max_context_len
        self.llm = SimpleNamespace(
            llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=limit))
        )

    def sync_weights(self) -> None:
        """Take the trainer's weights. A collective: every process calls it."""
        self._generation.sync()
        self._num_syncs += 1

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple[
        list[list[int]],
        list[list[int]],
        list[list[list[float | None]]] | None,
        list[list[list[int]]] | None,
    ]:
        """A completion for each prompt; a prompt's samples follow one another.

        Returns prompts, completions, and for each completion and token the logprobs and ids of
        the sampled token and of those asked for beside it, the most likely first. The last two are
        None where the trainer wants none.
        """
        if images is not None:
            raise InvalidInputError("images", images, "are not supported; give text")
        # TRL's profiler knows the global step, which a resumed run goes on counting. Not all of its
        # trainers hand one over.
        step = self._num_syncs if profiler is None else profiler.step
        seeds = self._seeds.next_batch(
            len(prompts), num_generations, step=step, training=self._model.training
        )
        with profiler or nullcontext():
            rollouts = self._generation.generate(
                prompts, self._params, seeds, samples_per_prompt=num_generations
            )
        if self.trainer is not None:
            self._metrics.add(self.trainer, rollouts)
        completion_ids = [rollout.token_ids or [self._filler_id] for rollout in rollouts]
        if not self._with_logprobs:
            return prompts, completion_ids, None, None
        ranked = [self._ranked(rollout) for rollout in rollouts]
        logprobs = [[[logprob for _, logprob in token] for token in each] for each in ranked]
        token_ids = [[[token_id for token_id, _ in token] for token in each] for each in ranked]
        return prompts, completion_ids, logprobs, token_ids

    def _ranked(self, rollout: Rollout) -> list[list[tuple[int, float | None]]]:
        """Per token: (id, logprob) of the sampled one and of the most likely ones, those first.

        None: unknown, which TRL takes for the trainer's own.
        """
        if not rollout.token_ids:
            return [[(self._filler_id, None)]]
        sampled = zip(rollout.token_ids, rollout.logprobs, strict=True)
        if not rollout.extras.top_logprobs:
            return [[token] for token in sampled]
        ranked: list[list[tuple[int, float | None]]] = []
        for token, likely in zip(sampled, rollout.extras.top_logprobs, strict=True):
            among_them = any(token_id == token[0] for token_id, _ in likely)
            ranked.append([*likely] if among_them else [*likely, token])
        return ranked


def _eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens TRL's trainers take for the end of a completion, the tokenizer's first."""
    declared = model.generation_config.eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or ())
    others = [token_id for token_id in ids if token_id != tokenizer.eos_token_id]
    return [tokenizer.eos_token_id, *others]
