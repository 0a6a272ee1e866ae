"""From what Hydra composed to the job's configuration."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rollout.errors import InvalidInputError
from rollout.offline.config import RunConfig

DEFAULT_OUTPUT = "rollouts.jsonl"


def register_run_schema() -> None:
    """Types and checks for conf/config.yaml, under the name by which its defaults list asks."""
    schema = OmegaConf.structured(RunConfig)
    # Each spec has options of its own: factory_of() knows them, and names those there are.
    OmegaConf.set_struct(schema.spec, False)
    ConfigStore.instance().store(name="run_schema", node=schema, provider="specrollout")


def run_config_from(config: DictConfig) -> RunConfig:
    """The composed configuration as checked dataclasses. Raises InvalidInputError."""
    required = {"model.path": "model.path=my/model", "data.path": "data.path=prompts.jsonl"}
    for name in sorted(OmegaConf.missing_keys(config), reverse=True):
        example = f", for example {required[name]}" if name in required else ""
        raise InvalidInputError(name, None, f"must be given{example} (see specrollout --help)")
    if config.output.path is None:
        sweeps = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
        folder = Path(HydraConfig.get().runtime.output_dir) if sweeps else Path()
        config = copy.deepcopy(config)
        config.output.path = str(folder / DEFAULT_OUTPUT)
    return cast(RunConfig, OmegaConf.to_object(config))
