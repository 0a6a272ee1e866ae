"""An engine's settings: OpenRLHF's, and our own arguments on its command line.

Ours are ``--specrollout.<name> <value>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from rollout.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig, engine_config
from rollout.engine.engine import RolloutEngine
from rollout.engine.rank_processes import open_on_ranks
from rollout.engine.worker_factory import worker_factory
from rollout.errors import InvalidInputError
from rollout.hub import model_folder
from rollout.trainers.openrlhf.arguments import SIZE
from rollout.trainers.tensor_parallel import tensor_parallel
from rollout.validation import checked_flag, checked_seconds

PREFIX = "--specrollout."

_ENGINE_FIELDS = {
    each.name
    for part in (ModelConfig, MemoryConfig, SchedulerConfig, EngineConfig)
    for each in fields(part)
} - {"model", "memory", "scheduler"}
_GIVEN_BY_OPENRLHF = {
    "path": "--actor.model_name_or_path",
    "max_context_len": "--data.max_len",
    "prefix_cache": "--vllm.enable_prefix_caching",
    "parallel": f"--{SIZE}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnOptions:
    """The launcher's own options, checked when made without loading anything."""

    spec: str = "ngram"  # a name in conf/spec
    spec_options: dict[str, Any] = field(default_factory=dict)  # over that file's own
    overrides: dict[str, Any] = field(default_factory=dict)  # fields of EngineConfig's parts
    sync_timeout: float = 300.0  # seconds the next parameter of an update may take to come
    keep_kv: bool = False  # requests in flight keep the KV of older weights over an update
    exact_training: bool = False  # the trainer's logprobs are the engine's, bit for bit

    def __post_init__(self) -> None:
        checked_seconds(self.sync_timeout, f"{PREFIX}sync_timeout")
        checked_flag(self.keep_kv, f"{PREFIX}keep_kv")
        checked_flag(self.exact_training, f"{PREFIX}exact_training")
        for name, argument in _GIVEN_BY_OPENRLHF.items():
            if name in self.overrides:
                raise InvalidInputError(
                    f"{PREFIX}{name}", self.overrides[name], f"is set by {argument}"
                )
        engine_config("unread", self.overrides)  # the path is not looked at
        worker_factory(self.spec, **self.spec_options)

    @property
    def device(self) -> str:
        return str(self.overrides.get("device", "auto"))


def split_arguments(arguments: Sequence[str]) -> tuple[OwnOptions, list[str]]:
    """The launcher's own options, and the other arguments for OpenRLHF. ``--specrollout.a 1`` and
    ``--specrollout.a=1`` are one.

    A name of the engine's configuration goes there, ``spec``, ``sync_timeout``, ``keep_kv`` and
    ``exact_training`` to `OwnOptions`, any other to the worker that ``spec`` names. Values are read
    as YAML scalars. If a name is given twice the last counts. Raises InvalidInputError for an
    unknown name or a missing value.
    """
    given: dict[str, Any] = {}
    rest: list[str] = []
    left = iter(arguments)
    for argument in left:
        if not argument.startswith(PREFIX):
            rest.append(argument)
            continue
        name, equals, value = argument.removeprefix(PREFIX).partition("=")
        if not equals:
            value = next(left, "")
            if not value or value.startswith("--"):
                raise InvalidInputError(f"{PREFIX}{name}", value, "needs a value")
        given[name] = yaml.safe_load(value)
    own = {"spec", "sync_timeout", "keep_kv", "exact_training"} & given.keys()
    options = OwnOptions(
        **{name: given[name] for name in own},
        overrides={name: given[name] for name in given.keys() & _ENGINE_FIELDS},
        spec_options={name: given[name] for name in given.keys() - _ENGINE_FIELDS - own},
    )
    return options, rest


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSettings:
    """The settings of an actor's engine, sent to it by Ray."""

    model: str  # a folder, or a name on the hub
    seed: int
    resumed_from: str  # the tag of the checkpoint that the run goes on from, or ""
    max_context_len: int
    prefix_cache: bool
    kv_fraction: float  # of the memory free once the model is read; an override goes before it
    dtype: str  # the trainer's parameters'; an override of the options goes before it
    tensor_parallel_size: int
    options: OwnOptions

    def make_engine(self) -> RolloutEngine:
        """Read the model, on as many ranks as it has. Raises what `open_on_ranks` does."""
        options, folder = self.options, model_folder(self.model, "--actor.model_name_or_path")
        given = {
            **tensor_parallel(self.tensor_parallel_size, folder, f"--{SIZE}"),
            "max_context_len": self.max_context_len,
            "prefix_cache": self.prefix_cache,
            "kv_fraction": self.kv_fraction,
            "dtype": self.dtype,
        }
        config = engine_config(folder, given | options.overrides)
        return open_on_ranks(config, worker_factory(options.spec, **options.spec_options))
