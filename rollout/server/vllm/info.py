"""Information that vLLM's clients ask for: version, liveness and the configuration."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from fastapi import APIRouter

from rollout.config import ModelConfig
from rollout.models.checkpoint import Checkpoint
from rollout.models.loader import resolve_device, resolve_dtype
from rollout.models.spec import ModelSpec
from rollout.server.serving import Serving
from rollout.server.sglang.info import server_info


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"])

    @router.get("/version")
    async def get_version() -> dict[str, str]:
        """The version of this package, not of a vLLM."""
        return {"version": version("specrollout")}

    @router.get("/liveness")
    async def liveness() -> dict[str, str]:
        """The engine's thread answers between two steps; nothing is generated for it."""
        await serving.call(lambda engine: None)
        return {"status": "ok"}

    @router.get("/server_info")
    async def get_server_info(config_format: Literal["json", "text"] = "json") -> dict[str, Any]:
        """The configuration by sglang's names, and in ``vllm_config`` what clients read of vLLM's.

        ``config_format``: ``text`` has it as one text.
        """
        config = _vllm_config(serving)
        shown = config if config_format == "json" else str(config)
        return {**await server_info(serving), "vllm_config": shown}

    @router.get("/load")
    async def load(include_inflight: bool = False, inflight_limit: int = 100) -> dict[str, int]:
        """Requests that run or wait. They are counted and never listed, whatever is asked for."""
        return {"server_load": serving.num_unfinished}

    @router.get("/get_world_size")
    async def get_world_size(include_dp: bool = True) -> dict[str, int]:
        """The members that a group of weights has beside the trainer: one for each rank.

        ``include_dp``: also those of other replicas.
        """
        parallel = serving.serve_config.parallel.size
        return {"world_size": parallel * (serving.num_replicas if include_dp else 1)}

    return router


def _vllm_config(serving: Serving) -> dict[str, Any]:
    config = serving.serve_config
    return {
        "model_config": {
            "model": serving.model_path,
            "served_model_name": serving.model_name,
            "max_model_len": serving.max_context_len,
            "dtype": str(_dtype(config.model)),
            # With temperature, penalties and bias, as trainers recompute them
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": True,
        },
        "parallel_config": {
            "tensor_parallel_size": config.parallel.size,
            "pipeline_parallel_size": 1,
            "data_parallel_size": serving.num_replicas,
            "world_size": config.parallel.size,
            "nnodes": 1,
        },
        "scheduler_config": {"max_num_seqs": serving.max_running},
        "lora_config": None,
        # Clients that open vLLM's own communicator stop here: see `init_weight_transfer_engine`
        "weight_transfer_config": None,
    }


def _dtype(model: ModelConfig) -> torch.dtype:
    folder = Path(model.path)
    stored = ModelSpec.read(folder).dtype or Checkpoint(folder).dtype
    return resolve_dtype(model.dtype, stored, resolve_device(model.device))
