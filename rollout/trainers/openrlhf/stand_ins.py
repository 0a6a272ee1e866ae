"""Stand-ins for what OpenRLHF imports of vllm, and of flash_attn where it is not installed.

`openrlhf.trainer.ray` imports vllm and `openrlhf.models` flash_attn when they are imported, used or
not. The names they ask for, and no other, are put into `sys.modules` of each process: those that
the trainer really uses work, the rest raise MissingPackageError when called.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch

from rollout.errors import InvalidInputError, RolloutError
from rollout.trainers.openrlhf.sampling import VllmSamplingParams
from rollout.weights.group import WeightGroup

BACKEND_VARIABLE = "SPECROLLOUT_SYNC_BACKEND"
TIMEOUT_VARIABLE = "SPECROLLOUT_SYNC_TIMEOUT"
EXACT_VARIABLE = "SPECROLLOUT_EXACT_TRAINING"
"""Environment variables of every Ray worker, set by the launcher: OpenRLHF's trainer hands on none
of backend, timeout and whether its models train exactly (1)."""

GROUP = "openrlhf"
"""The name of the weight group, whose rank 0 is the trainer and whose others are engines' ranks."""


@dataclass(frozen=True, slots=True)
class StatelessProcessGroup:
    """The address at which ``world_size`` processes will meet; rank 0 is the trainer."""

    host: str
    port: int
    rank: int
    world_size: int

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        return cls(host, port, rank, world_size)


class PyNcclCommunicator:
    """The trainer's end of the weight group. Broadcasts by ``--vllm.sync_backend``: nccl, or gloo,
    which goes through host memory.

    Engines join at the same time: returns when all have met. Raises WeightUpdateError where they do
    not within ``--specrollout.sync_timeout``.
    """

    def __init__(self, group: StatelessProcessGroup, device: object) -> None:
        """Meet the others. ``device`` is what vllm's class takes and is not used."""
        self._group = WeightGroup(
            master_address=group.host,
            master_port=group.port,
            rank=group.rank,
            world_size=group.world_size,
            group_name=GROUP,
            backend=os.environ[BACKEND_VARIABLE],
            timeout=float(os.environ[TIMEOUT_VARIABLE]),
        )
        self.device = self._group.device  # where a receiver's tensors must be

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        """Broadcast ``tensor`` of rank 0, into ``tensor`` of the others. It is there on return,
        whatever ``stream``.

        Raises WeightUpdateError when another process is gone or the time is over; the group is
        closed then.
        """
        if src != 0:
            raise InvalidInputError("src", src, "must be 0: the trainer sends")
        self._group.broadcast(tensor.detach().to(self.device).contiguous())


VLLM_VERSION = "0.29.0"  # the one OpenRLHF 0.11.2 names; it asks for the number alone

SETUP_HOOK = f"{__name__}.install"
"""Path of the function that each of Ray's workers calls before anything of OpenRLHF is imported."""


class MissingPackageError(RolloutError, ImportError):
    """OpenRLHF wants a package that is not installed."""


def is_installed(package: str) -> bool:
    """Whether a package is really installed: a stand-in does not count."""
    module = sys.modules.get(package)
    if module is not None:
        return not hasattr(module, "__specrollout_stand_in__")
    spec = importlib.util.find_spec(package)
    # A folder of that name on the path, a clone beside ours say, would be found too.
    return spec is not None and spec.origin is not None


def install() -> None:
    """Put the stand-ins into this process, and have its models train exactly if they are to. An
    installed flash_attn is left alone."""
    modules = _vllm()
    if not is_installed("flash_attn"):
        modules |= _flash_attn()
    for name, contents in modules.items():
        _install_module(name, contents)
    if os.environ.get(EXACT_VARIABLE) == "1":
        from rollout.trainers.openrlhf.exact import train_exactly

        train_exactly()


def _vllm() -> dict[str, dict[str, Any]]:
    return {
        "vllm": {
            "__version__": VLLM_VERSION,
            "SamplingParams": VllmSamplingParams,
            "AsyncEngineArgs": _missing("vllm", "AsyncEngineArgs"),
            "AsyncLLMEngine": _missing("vllm", "AsyncLLMEngine"),
        },
        "vllm.inputs": {"TokensPrompt": dict},
        "vllm.utils": {"random_uuid": lambda: uuid.uuid4().hex},
        "vllm.distributed": {},
        "vllm.distributed.utils": {"StatelessProcessGroup": StatelessProcessGroup},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": PyNcclCommunicator},
    }


def _flash_attn() -> dict[str, dict[str, Any]]:
    # No version: transformers takes the package for absent then, as it should.
    padding = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    return {
        "flash_attn": {},
        "flash_attn.bert_padding": {name: _missing("flash_attn", name) for name in padding},
        "flash_attn.utils": {},
        "flash_attn.utils.distributed": {"all_gather": _missing("flash_attn", "all_gather")},
    }


def _missing(package: str, name: str) -> Callable[..., NoReturn]:
    def raise_missing(*args: object, **kwargs: object) -> NoReturn:
        raise MissingPackageError(f"{package}.{name} was called, and {package} is not installed")

    raise_missing.__name__ = name
    return raise_missing


def _install_module(name: str, contents: Mapping[str, Any]) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []  # a package in which nothing else is found
    vars(module).update(contents, __specrollout_stand_in__=True)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
