"""Composes the configuration with Hydra and checks types, required and unknown keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rollout.errors import InvalidInputError
from rollout.offline.command_line import hydra_arguments, key_hint
from rollout.validation import did_you_mean

T = TypeVar("T")

_EXAMPLES = {"model.path": "model.path=my/model", "data.path": "data.path=prompts.jsonl"}
_RAISES_ERRORS = "HYDRA_FULL_ERROR"


def run_hydra(
    config_name: str, kind: type, arguments: Sequence[str], run: Callable[[DictConfig], None]
) -> None:
    """Call ``run`` with the configuration ``kind`` that the arguments ask for, once for each job of
    a sweep. They are in `sys.argv` then, as Hydra reads them.

    Exits where they ask for help or the configuration. Raises InvalidInputError for an argument
    that Hydra refuses; ``run`` raises nothing.
    """
    given = hydra_arguments(arguments, kind)
    sys.argv = [sys.argv[0], *given]
    traceback_wanted = os.environ.get(_RAISES_ERRORS)

    def run_one(config: DictConfig) -> None:
        with _environment(_RAISES_ERRORS, traceback_wanted):
            run(config)

    main = hydra.main(config_path="pkg://rollout.conf", config_name=config_name, version_base="1.3")
    # Hydra would print its errors over many lines, and exit.
    with _environment(_RAISES_ERRORS, "1"), hydra_errors(kind, given):
        main(run_one)()


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    former = os.environ.pop(name, None)
    try:
        if value is not None:
            os.environ[name] = value
        yield
    finally:
        os.environ.pop(name, None)
        if former is not None:
            os.environ[name] = former


@contextmanager
def hydra_errors(kind: type, arguments: Sequence[str]) -> Iterator[None]:
    """Raises InvalidInputError, with one line that names the argument, for Hydra's errors."""
    try:
        yield
    except HydraException as error:
        raise _refusal(error, kind, arguments) from error


def _refusal(error: HydraException, kind: type, arguments: Sequence[str]) -> InvalidInputError:
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).partition("/")
        remedy = f"must be one of {', '.join(error.options)}{did_you_mean(option, error.options)}"
        return InvalidInputError(group, option, remedy)
    message = f"{error.override if isinstance(error, OverrideParseException) else ''} {error}"
    given = [each.lstrip("+~").partition("=") for each in arguments]
    # The message names the argument, or its key.
    named = [each for each in given if each[0] in message]
    whole = ("arguments", "", " ".join(arguments))
    key, _, value = max(named, key=lambda each: len(each[0]), default=whole)
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        remedy = f"no such key{key_hint(key, kind)} (--cfg job shows all)"
    elif isinstance(cause, OmegaConfBaseException):
        remedy = str(cause.msg).splitlines()[0]
    elif "Ambiguous value" in message:
        remedy = "must be one value; a job sweeps over several with -m"
    else:
        remedy = " ".join(str(error).split())
    return InvalidInputError(key, value, remedy)


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
