"""A LoRA adapter as PEFT saves it, in a folder: an update, which `lora` says how to apply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

from rollout.errors import InvalidInputError
from rollout.models.spec import read_json
from rollout.weights.checkpoint_source import CheckpointSource
from rollout.weights.lora import LORA_A, joined_scaling, split_lora_name

_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."

ADDED_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
"""The ``init_lora_weights`` that leave the trainer's base as it was, and as the engine has it."""

# Fields by which an adapter is more than scaling * B @ A, or another scaling in each layer.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "kasa_config": (None,),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,),  # applies to some tokens alone
    "init_lora_weights": ADDED_INITS,
}


def is_adapter_folder(folder: Path) -> bool:
    """Whether PEFT has saved an adapter there."""
    return (folder / _CONFIG).is_file()


def adapter_scaling(config: Mapping[str, Any], field: str = "peft_config") -> float:
    """The one scaling that PEFT's configuration of a LoRA adapter gives.

    Raises InvalidInputError, naming ``field`` and its own, for an adapter that is more than that.
    """
    for name, plain in _PLAIN.items():
        value = config.get(name, plain[0])
        if value not in plain:
            raise InvalidInputError(f"{field}.{name}", value, "is not read: send merged weights")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        raise InvalidInputError(f"{field}.r", rank, "must be a positive integer")
    if not isinstance(alpha, int | float):
        raise InvalidInputError(f"{field}.lora_alpha", alpha, "must be a number")
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def update_name(name: str) -> str:
    """The name of PEFT's under which an update knows a tensor that it saves."""
    return name if split_lora_name(name) else name.removeprefix(_PREFIX)


def _alpha(config: Mapping[str, Any], module: str) -> Any:
    """``lora_alpha`` of a module, by PEFT's rule: the first pattern that matches the end of its
    path, from a dot on."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise InvalidInputError(f"{_CONFIG}.alpha_pattern", patterns, "must be an object")
    try:
        matching = [key for key in patterns if re.match(rf"(.*\.)?({key})$", module)]
    except (TypeError, re.error) as error:
        raise InvalidInputError(
            f"{_CONFIG}.alpha_pattern", patterns, f"must have regular expressions: {error}"
        ) from error
    return patterns[matching[0]] if matching else config["lora_alpha"]


class AdapterFolder(CheckpointSource):
    """A and B of an adapter, and the modules that are saved whole.

    An adapter's rank is that of its A, which is what ``rank_pattern`` says. Raises CheckpointError
    for an incomplete folder, and what `adapter_scaling` does, except for patterns.
    """

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / _CONFIG, "an adapter's folder")
        plain = {**config, "rank_pattern": None, "alpha_pattern": None}
        scaling = adapter_scaling(plain, _CONFIG)
        super().__init__(folder)
        self._names = {name: update_name(name) for name in self._names}
        scalings: dict[str, float] = {}
        for name, spec in self.manifest().items():
            weight, kind = split_lora_name(name) or ("", "")
            if kind == LORA_A:
                alpha = _alpha(config, weight.removesuffix(".weight"))
                own = {"r": (*spec.shape, 0)[0], "lora_alpha": alpha}
                scalings[weight] = adapter_scaling(plain | own, _CONFIG)
        self.scaling = joined_scaling(scalings) if scalings else scaling
        self.own_options = {"lora_scaling": self.scaling}
        self.whole = sorted(name for name in self.manifest() if not split_lora_name(name))
        """Names of the tensors that replace the base's."""
        self.keeps_ties = bool(config.get("ensure_weight_tying"))
