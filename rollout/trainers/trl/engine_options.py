"""The engine's options from those that TRL has for vLLM's engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from rollout.errors import InvalidInputError
from rollout.ops import gpu
from rollout.scheduler.step_limits import StepLimits
from rollout.trainers.tensor_parallel import tensor_parallel

_SIZE = "vllm_tensor_parallel_size"


def model_folder(model: Any) -> str:
    """The folder a transformers model was loaded from, maybe in the hub's cache.

    Nothing is fetched. Raises InvalidInputError where there is none.
    """
    name = model.name_or_path
    if os.path.isdir(name):
        return name
    commit = getattr(model.config, "_commit_hash", None)
    cached = try_to_load_from_cache(name, "config.json", revision=commit) if name else None
    if not isinstance(cached, str):
        raise InvalidInputError(
            "model.name_or_path", name, "is no folder and not in the hub's cache; give model_path"
        )
    return os.path.dirname(cached)


def engine_overrides(
    own: dict[str, Any],
    *,
    model: Any,
    accelerator: Any,
    in_process: bool,
    gpu_memory_utilization: float,
    max_model_length: int | None,
    max_num_seqs: int | None,
) -> dict[str, Any]:
    """Overrides for `open_pretrained`: TRL's, and over them the caller's ``own``.

    The engine computes in the dtype the trainer's forward does, and on its device if it is
    ``in_process``; a replica elsewhere on one of that kind, which may go by another number.
    """
    if not 0 < gpu_memory_utilization < 1:
        raise InvalidInputError(
            "vllm_gpu_memory_utilization", gpu_memory_utilization, "must be in (0, 1)"
        )
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    chosen: dict[str, Any] = {
        "dtype": mixed.get(accelerator.mixed_precision, model.dtype),
        "device": str(accelerator.device) if in_process else accelerator.device.type,
        "kv_fraction": gpu_memory_utilization,
        "max_context_len": max_model_length,
    }
    if max_num_seqs is not None:
        usual = StepLimits.usual(gpu.total_bytes(accelerator.device))
        if max_num_seqs < usual.max_running:
            chosen["max_running"] = max_num_seqs
    return chosen | own


def require_room_for_each(accelerator: Any, cluster_options: Mapping[str, Any]) -> None:
    """Require a Ray in which the replicas of each of the trainer's processes find room.

    Raises InvalidInputError where one could take another's, or end the Ray the others are in.
    """
    if accelerator.num_processes == 1:
        return
    if cluster_options.get("address") in (None, "local") and not os.environ.get("RAY_ADDRESS"):
        raise InvalidInputError(
            "cluster_options.address", cluster_options.get("address"),
            "with several processes, start Ray before them and name it: auto, or host:port",
        )  # fmt: skip
    if cluster_options.get("num_cpus") is None:
        raise InvalidInputError(
            "cluster_options.num_cpus", None,
            "with several processes, say how many a replica is given: each has replicas of its own",
        )  # fmt: skip


def rank_overrides(
    size: int, model_path: str, *, num_processes: int, in_process: bool
) -> Mapping[str, Mapping[str, Any]]:
    """Overrides that make each ``size`` processes of the trainer the ranks of one model.

    Raises InvalidInputError for a size that does not divide the processes, or the model.
    """
    if size != 1 and not in_process:
        raise InvalidInputError(_SIZE, size, "must be 1 with a cluster")
    overrides = tensor_parallel(size, model_path, _SIZE)
    if num_processes % size:
        raise InvalidInputError(_SIZE, size, f"must divide the trainer's {num_processes} processes")
    return overrides


def require_servers_own(
    tensor_parallel_size: int, cluster: str, overrides: Mapping[str, Any]
) -> None:
    """Raises InvalidInputError for options of an engine that the server has made already."""
    if tensor_parallel_size != 1:
        remedy = "is the server's: specrollout serve parallel=tensor parallel.size=N"
        raise InvalidInputError(_SIZE, tensor_parallel_size, remedy)
    for name, value in {"cluster": None if cluster == "none" else cluster, **overrides}.items():
        if value is not None:
            remedy = "is the server's with vllm_mode=server: give it to `specrollout serve`"
            raise InvalidInputError(name, value, remedy)


def require_supported(
    *,
    accelerator: Any,
    processing_class: Any,
    mode: str,
    structured_outputs_regex: str | None,
    model_impl: str,
) -> None:
    """Raises InvalidInputError, by the name TRL's config has for it, for what we do not have."""
    if hasattr(processing_class, "image_processor"):
        raise InvalidInputError(
            "processing_class",
            type(processing_class).__name__,
            "images are not supported; give a tokenizer",
        )
    if mode not in ("colocate", "server"):
        raise InvalidInputError("vllm_mode", mode, "must be colocate or server")
    if structured_outputs_regex is not None:
        raise InvalidInputError(
            "vllm_structured_outputs_regex",
            structured_outputs_regex,
            "is not supported; leave it out",
        )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.fsdp_version == 1:
        raise InvalidInputError(
            "fsdp_version",
            1,
            "must be 2: FSDP1 wraps the model later than the trainer hands it over",
        )
    if model_impl not in ("auto", "vllm"):
        raise InvalidInputError(
            "vllm_model_impl", model_impl, "must be left alone: models are our own"
        )
