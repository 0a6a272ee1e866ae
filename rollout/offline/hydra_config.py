"""Checks of the configuration that Hydra composed: types, required keys, unknown keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from rollout.errors import InvalidInputError
from rollout.validation import did_you_mean

T = TypeVar("T")

_EXAMPLES = {"model.path": "model.path=my/model", "data.path": "data.path=prompts.jsonl"}


def register_schema(name: str, kind: type) -> None:
    """Make the dataclass ``kind`` the schema of that name in a defaults list of conf/."""
    schema = OmegaConf.structured(kind)
    # Each spec has options of its own: factory_of() knows them, and names those there are.
    OmegaConf.set_struct(schema.spec, False)
    ConfigStore.instance().store(name=name, node=schema, provider="specrollout")


def checked_config(config: DictConfig, kind: type[T], command: str) -> T:
    """The composed configuration as checked dataclasses.

    Raises InvalidInputError for a required key that is missing, naming ``command``'s help, and for
    a key that ``+`` added where the schema has none.
    """
    for name in sorted(OmegaConf.missing_keys(config), reverse=True):
        example = f", for example {_EXAMPLES[name]}" if name in _EXAMPLES else ""
        raise InvalidInputError(name, None, f"must be given{example} (see {command} --help)")
    for name, value, known in _unknown_keys(config, ""):
        hint = did_you_mean(name.rpartition(".")[2], known)
        raise InvalidInputError(name, value, f"no such key{hint}; there are {', '.join(known)}")
    return cast(T, OmegaConf.to_object(config))


def _unknown_keys(config: DictConfig, prefix: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Keys that a dataclass lacks, each with its value and the keys that the dataclass has."""
    kind = OmegaConf.get_type(config)
    if kind is None or not is_dataclass(kind):
        return
    known = [field.name for field in fields(kind)]
    for key, value in config.items():
        if key not in known:
            yield f"{prefix}{key}", value, known
        elif isinstance(value, DictConfig):
            yield from _unknown_keys(value, f"{prefix}{key}.")
