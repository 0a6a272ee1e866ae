"""From the name of a spec to the worker it builds: the only place the engine learns of workers.

conf/spec/<name>.yaml names the worker's build function in ``_target_``; the other keys are its
options.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any

import yaml

from rollout.config import EngineConfig
from rollout.errors import InvalidInputError
from rollout.worker import Worker

WorkerFactory = Callable[[EngineConfig], Worker]


def worker_factory(spec: str, **options: Any) -> WorkerFactory:
    """The factory that conf/spec/``spec``.yaml describes, with ``options`` over its own.

    Raises InvalidInputError for an unknown name or option.
    """
    folder = files("rollout.conf") / "spec"
    known = {entry.name[:-5]: entry for entry in folder.iterdir() if entry.name.endswith(".yaml")}
    if spec not in known:
        raise InvalidInputError("spec", spec, f"one of {', '.join(sorted(known))}")
    settings: dict[str, Any] = yaml.safe_load(known[spec].read_text())
    module, _, name = settings.pop("_target_").rpartition(".")
    for option in options:
        if option not in settings:
            raise InvalidInputError(
                f"spec_options[{option!r}]", options[option],
                f"spec={spec} knows {', '.join(sorted(settings)) or 'no options'}",
            )  # fmt: skip
    return partial(getattr(importlib.import_module(module), name), **(settings | options))
