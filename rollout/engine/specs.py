"""From the name of a spec to the worker it builds: the only place the engine learns of workers.

conf/spec/<name>.yaml names the worker's build function in ``_target_``; the other keys are its
options.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Protocol

import yaml

from rollout.checked import checked_name
from rollout.config import EngineConfig
from rollout.engine.worker import Worker
from rollout.errors import InvalidInputError
from rollout.models.loader import Progress


class WorkerFactory(Protocol):
    def __call__(self, config: EngineConfig, progress: Progress | None = None, /) -> Worker:
        """``progress`` is told how far the model's weights are read."""
        ...


def worker_factory(spec: str, **options: Any) -> WorkerFactory:
    """The factory that conf/spec/``spec``.yaml describes, with ``options`` over its own.

    Raises InvalidInputError for an unknown name or option.
    """
    folder = _conf() / "spec"
    known = {entry.name[:-5]: entry for entry in folder.iterdir() if entry.name.endswith(".yaml")}
    if checked_name(spec, "spec") not in known:
        raise InvalidInputError("spec", spec, f"one of {', '.join(sorted(known))}")
    return factory_of(yaml.safe_load(known[spec].read_text()) | options)


def _conf() -> Traversable:
    """conf/: a part of the package where it is installed, beside it in a bare source tree."""
    try:
        return files("rollout.conf")
    except ModuleNotFoundError:
        return Path(__file__).resolve().parents[2] / "conf"


def factory_of(settings: Mapping[str, Any]) -> WorkerFactory:
    """The build function that ``_target_`` names, with the other keys as its options.

    Raises InvalidInputError for a target that cannot be imported or an option it does not have.
    """
    options = {name: value for name, value in settings.items() if name != "_target_"}
    target = settings.get("_target_")
    module, _, name = str(target).rpartition(".")
    try:
        build = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInputError("spec._target_", target, f"cannot be imported: {error}") from error
    parameters = inspect.signature(build).parameters.values()
    known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    for option, value in options.items():
        if option not in known:
            raise InvalidInputError(
                f"spec.{option}", value, f"{target} knows {', '.join(known) or 'no options'}"
            )
    return partial(build, **options)
