"""Finds the build function of a worker by the name of its kind of drafts.

conf/spec/<name>.yaml names the build function in ``_target_``; the other keys are its options.
Nothing else of the engine knows which workers there are.
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

from rollout.config import EngineConfig
from rollout.engine.worker import Worker
from rollout.errors import InvalidInputError
from rollout.models.checkpoint import Progress
from rollout.validation import checked_name, did_you_mean


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

    A build function may have a function ``check`` of the same options, which is called here: a
    mistake then shows before prompts are read or replicas started.

    Raises InvalidInputError for a target that cannot be imported, an option it does not have, and
    what ``check`` does.
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
            hint = did_you_mean(option, known).removeprefix(", ").capitalize()
            known_options = f"{_spec_of(target)} knows {', '.join(known) or 'no options'}"
            raise InvalidInputError(
                f"spec.{option}", value, f"{known_options}. {hint}".rstrip(". ")
            )
    if hasattr(build, "check"):
        build.check(**options)
    return partial(build, **options)


def _spec_of(target: object) -> str:
    """The override that chooses the build function, such as ``spec=ngram``; else its own name."""
    package, *names = str(target).split(".")
    return f"spec={names[0]}" if package == "spec_workers" and len(names) == 2 else str(target)


_OF_A_HOST = frozenset({"draft_path", "corpus_path", "external_corpora", "feature_ring"})


def shared_settings(factory: WorkerFactory, worker: Worker) -> dict[str, object]:
    """The settings that must be equal on all ranks. Files are left out: hosts may name them
    differently."""
    found: dict[str, object] = {"model.dtype": str(worker.model_dtype)}
    if isinstance(factory, partial):
        found["spec"] = factory.func.__module__
        options = {
            name: value for name, value in factory.keywords.items() if name not in _OF_A_HOST
        }
        found |= {f"spec.{name}": value for name, value in options.items()}
    return found
