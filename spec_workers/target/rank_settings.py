"""Checks that ranks are started alike."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import torch

from rollout.config import EngineConfig
from rollout.models.spec import ModelSpec
from rollout.parallel import RankGroup
from rollout.parallel.rank_group import check_alike


def check_settings(group: RankGroup, config: EngineConfig, device: torch.device) -> None:
    """Raises ParallelError where another rank has other versions, configuration or model.

    Files and devices may have other names on other hosts.
    """
    if group.size == 1:
        return
    sections = asdict(config) | {"config.json": asdict(ModelSpec.read(Path(config.model.path)))}
    settings: dict[str, object] = {name: version(name) for name in ("specrollout", "torch")}
    for section, part in sections.items():
        fields = part if isinstance(part, dict) else {"": part}
        settings |= {f"{section}.{name}".rstrip("."): value for name, value in fields.items()}
    for own in ("model.path", "model.tokenizer", "num_threads"):
        del settings[own]
    check_alike(group, settings | {"model.device": device.type})


def version(package: str) -> str:
    """The version of an installed package; empty: it runs from a source tree."""
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return ""
