"""OpenRLHF's arguments that the engine must know, and those it cannot honour.

OpenRLHF makes its parser inside its main, after which it is too late to refuse: engines would be
loading. So the arguments that matter are read here first. Names and defaults are those of 0.11.2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rollout.errors import InvalidInputError
from rollout.trainers.tensor_parallel import tensor_parallel

SIZE = "vllm.tensor_parallel_size"

_VALUES: dict[str, tuple[type, object]] = {
    "vllm.num_engines": (int, None),
    SIZE: (int, 1),
    "vllm.sync_backend": (str, "nccl"),
    "vllm.gpu_memory_utilization": (float, 0.95),
    "data.max_images_per_prompt": (int, 0),
    "ds.param_dtype": (str, "bf16"),
    "ds.attn_implementation": (str, "flash_attention_2"),
    "ds.ring_attn_size": (int, 1),
    "ds.lora.rank": (int, 0),
    "ckpt.path": (str, "./ckpt/checkpoints_ppo_ray"),
    "actor.model_name_or_path": (str, None),
}
_FLAGS = (
    "vllm.sync_with_ray",
    "train.colocate_all",
    "train.async_enable",
    "train.dynamic_batch_enable",
    "ds.packing_samples",
    "ds.load_in_4bit",
    "ckpt.load_enable",
)
ARGUMENTS: dict[str, object] = {
    **{name: default for name, (_, default) in _VALUES.items()},
    **dict.fromkeys(_FLAGS, False),
}
"""The arguments that are read before OpenRLHF's parser runs, with its defaults."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("vllm.num_engines", lambda n: (n or 0) > 0, "must be >= 1"),
    (SIZE, lambda n: n > 0, "must be >= 1"),
    ("vllm.sync_backend", lambda name: name in ("nccl", "gloo"), "must be nccl or gloo"),
    ("vllm.sync_with_ray", lambda on: not on, "is not implemented: leave it out"),
    ("vllm.gpu_memory_utilization", lambda x: 0 < x < 1, "must be in (0, 1)"),
    ("data.max_images_per_prompt", lambda n: n == 0, "must be 0: images are not implemented"),
    ("ds.lora.rank", lambda n: n == 0, "must be 0: OpenRLHF sends adapters unmerged"),
    ("ds.load_in_4bit", lambda on: not on, "is not implemented: leave it out"),
    ("ds.param_dtype", lambda name: name in _DTYPES, f"must be one of {', '.join(_DTYPES)}"),
)
_RULES_WITHOUT_FLASH_ATTN: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("ds.attn_implementation", lambda name: "flash_attention" not in name, "give sdpa or eager"),
    ("ds.packing_samples", lambda on: not on, "leave it out"),
    ("train.dynamic_batch_enable", lambda on: not on, "leave it out"),
    ("ds.ring_attn_size", lambda n: n == 1, "leave it out"),
)
"""Argument, whether its value can be honoured, what to do where it cannot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerArguments:
    """The arguments of OpenRLHF that the engine needs and its trainer does not pass on."""

    sync_backend: str  # nccl or gloo: how parameters are broadcast
    dtype: str  # the trainer's parameters'
    resumed_from: str  # the tag of the checkpoint that is loaded, or ""


def read_arguments(arguments: Sequence[str], *, has_flash_attn: bool) -> TrainerArguments:
    """Check OpenRLHF's arguments. ``has_flash_attn``: whether it is installed.

    Raises InvalidInputError, naming the argument, for what this engine or a missing flash_attn
    cannot honour; leaves by SystemExit for a value of the wrong type, as OpenRLHF does.
    """
    parser = argparse.ArgumentParser(prog="openrlhf.cli.train_ppo_ray", add_help=False)
    for name, (kind, default) in _VALUES.items():
        parser.add_argument(f"--{name}", type=kind, default=default)
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    given = vars(parser.parse_known_args(list(arguments))[0])

    def refuse(name: str, remedy: str) -> NoReturn:
        raise InvalidInputError(f"--{name}", given[name], remedy)

    for name, is_fine, remedy in _RULES:
        if not is_fine(given[name]):
            refuse(name, remedy)
    is_shared = given["train.colocate_all"] and not given["train.async_enable"]
    if is_shared and given["vllm.sync_backend"] != "gloo":
        # OpenRLHF hands over CUDA IPC handles where it may use nccl.
        refuse("vllm.sync_backend", "must be gloo with --train.colocate_all: CUDA IPC is not "
               "implemented")  # fmt: skip
    model = given["actor.model_name_or_path"]
    if model is not None and Path(model).is_dir():  # of others the actors look
        tensor_parallel(given[SIZE], model, f"--{SIZE}")
    if not has_flash_attn:
        for name, is_fine, remedy in _RULES_WITHOUT_FLASH_ATTN:
            if not is_fine(given[name]):
                refuse(name, f"needs flash_attn, which is not installed; {remedy}")
    return TrainerArguments(
        sync_backend=given["vllm.sync_backend"],
        dtype=_DTYPES[given["ds.param_dtype"]],
        resumed_from=_latest_tag(given["ckpt.path"]) if given["ckpt.load_enable"] else "",
    )


def _latest_tag(path: str) -> str:
    """The latest tag of the actor's checkpoints, as DeepSpeed notes it; "" where there are none, as
    OpenRLHF begins anew then."""
    latest = Path(path, "_actor", "latest")
    return latest.read_text().strip() if latest.is_file() else ""
