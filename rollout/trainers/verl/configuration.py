"""verl's configuration objects, as a replica gets them, to a server's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig

from rollout.errors import InvalidInputError
from rollout.trainers.verl.options import NAME, OWN, ServerOptions, server_options


def options_of(config: Any, model_config: Any, *, standalone: bool) -> ServerOptions:
    """Raises InvalidInputError for whatever cannot be honoured, naming it."""
    rollout = omega_conf_to_dataclass(config)
    model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
    own = rollout.engine_kwargs.get(NAME) or {}
    if isinstance(own, DictConfig):
        own = OmegaConf.to_container(own, resolve=True)
    if not isinstance(own, Mapping):
        raise InvalidInputError(OWN, own, "must be a mapping")
    return server_options(rollout, model, own, standalone=standalone)
