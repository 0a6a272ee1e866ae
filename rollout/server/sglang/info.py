"""Information about the served model, its options and its load."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from rollout.engine.metrics import EngineStatus
from rollout.server.serving import Serving

_SECRETS = frozenset({"api_key", "admin_key"})


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["sglang"])
    model_info = _model_info(serving)

    @router.get("/get_weight_version")
    async def get_weight_version() -> dict[str, str]:
        return {"weight_version": await serving.told_version()}

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def get_model_info() -> dict[str, Any]:
        return {**model_info, "weight_version": await serving.told_version()}

    @router.get("/get_server_info")
    async def get_server_info() -> dict[str, Any]:
        """The configuration, without keys, and what the engine is doing."""
        return await server_info(serving)

    @router.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """How busy it is. The number of requests is of now, whatever the engine is doing."""
        known = await serving.status_cache.latest()
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": version("specrollout"),
            "loads": [_load(serving, known.status)],
        }

    @router.get("/get_load")
    async def load() -> list[dict[str, Any]]:
        known = await serving.status_cache.latest()
        found = _load(serving, known.status)
        return [
            {
                "dp_rank": 0,
                "num_reqs": found["num_total_reqs"],
                "num_waiting_reqs": found["num_waiting_reqs"],
                "num_tokens": found["num_used_tokens"],
            }
        ]

    return router


async def server_info(serving: Serving) -> dict[str, Any]:
    """The configuration, without keys, and what the engine is doing, by sglang's names."""
    known = await serving.status_cache.latest()
    return {
        **_server_arguments(serving),
        "startup_time": serving.started,
        "version": version("specrollout"),
        "internal_states": [_load(serving, known.status)],
    }


def _load(serving: Serving, status: EngineStatus) -> dict[str, Any]:
    unfinished = serving.num_unfinished
    running = min(status.running, unfinished)
    total = status.total
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": unfinished - running,
        "num_total_reqs": unfinished,
        "max_running_requests": serving.max_running,
        "queues": {"waiting": unfinished - running},
        "num_used_tokens": status.kv_used,
        "max_total_num_tokens": status.kv_slots,
        "token_usage": status.kv_used / status.kv_slots,
        "avg_spec_accept_length": total.accept_length,
        "speculative": {
            "accept_length": total.accept_length,
            "accept_rate": total.accepted / total.drafted if total.drafted else 0.0,
        },
    }


def _server_arguments(serving: Serving) -> dict[str, Any]:
    config = serving.serve_config
    own = {name: value for name, value in asdict(config.server).items() if name not in _SECRETS}
    return {
        # sglang's names
        "model_path": serving.model_path,
        "served_model_name": serving.model_name,
        "tokenizer_path": config.model.tokenizer or serving.model_path,
        "host": config.server.host,
        "port": config.server.port,
        "context_length": serving.max_context_len,
        "random_seed": serving.seed,
        "max_running_requests": serving.max_running,
        "chunked_prefill_size": serving.limits.chunk_len,
        "tp_size": config.parallel.size,
        "disable_radix_cache": not config.memory.prefix_cache,
        "pp_size": 1,
        "ep_size": 1,
        "dp_size": config.cluster.replicas,
        "nnodes": 1,
        "node_rank": 0,
        # ours
        "server": own,
        "spec": config.spec,
        "cluster": asdict(config.cluster),
        "parallel": asdict(config.parallel),
        "memory": asdict(config.memory),
        "scheduler": asdict(config.scheduler) | asdict(serving.limits),
        "exact": config.exact,
    }


def _model_info(serving: Serving) -> dict[str, Any]:
    config = json.loads((Path(serving.model_path) / "config.json").read_text())
    return {
        "model_path": serving.model_path,
        "served_model_name": serving.model_name,
        "tokenizer_path": serving.serve_config.model.tokenizer or serving.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
    }
