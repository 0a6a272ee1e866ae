"""The keys of the commands with their defaults, as docs/keys.md lists them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra import compose
from omegaconf import OmegaConf

_SPECS = ("ngram", "eagle", "block", "mtp", "hybrid")  # those with options


def key_defaults() -> dict[str, str]:
    """Each key of a job or a server with its default. Hydra must be initialized.

    A default that depends on the spec is ``4 (eagle), 1 (mtp)``.
    """
    specs_of: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for spec in _SPECS:
        config = OmegaConf.to_container(compose("config", overrides=[f"spec={spec}"]))
        for key, default in _leaves(config):
            specs_of[key].setdefault(default, []).append(spec)
    del specs_of["spec._target_"]
    server = OmegaConf.to_container(compose("serve").server, resolve=False)
    return {key: _joined(specs) for key, specs in specs_of.items()} | dict(
        _leaves(server, "server.")
    )


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif value == "???":
            yield f"{prefix}{name}", "required"
        else:
            yield f"{prefix}{name}", str(value) if isinstance(value, str) else json.dumps(value)


def _joined(specs_of_default: Mapping[str, Sequence[str]]) -> str:
    if len(specs_of_default) == 1:
        return next(iter(specs_of_default))
    return ", ".join(
        f"{default} ({', '.join(specs)})" for default, specs in specs_of_default.items()
    )
