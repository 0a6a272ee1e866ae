"""One rank drives an engine of several: what it calls, the others call.

Calls travel as JSON, so what brings tensors of its own is not among them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from inspect import ismethod
from typing import Any, TypeVar, cast

import torch

from rollout.config import ParallelConfig
from rollout.engine.engine import RolloutEngine
from rollout.engine.protocol import Engine, Ranks, methods_on
from rollout.errors import InvalidInputError, ParallelError, RolloutError
from rollout.models.loader import Progress
from rollout.parallel import RankGroup, open_ranks
from rollout.types import SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")
OpenEngine = Callable[[Progress | None], Engine]

_PATIENCE = 30 * 86_400.0
"""Seconds that a rank waits to be told what to do: rank 0 may have to wait for its users."""


def run_spmd(
    config: ParallelConfig, open_engine: OpenEngine, lead: Callable[[OpenEngine], T]
) -> T | None:
    """Run ``lead`` on rank 0 and return its result; the others repeat its engine calls and return
    None.

    ``lead`` is handed the function that opens the engine, on all ranks then. Raises what both
    raise, and ParallelError where a rank is lost.
    """
    group = open_ranks(config, torch.device("cpu"), patience=_PATIENCE).all
    try:
        if group.rank:
            _follow(group, open_engine)
            return None
        try:
            return lead(partial(_opened, group, open_engine))
        finally:
            with suppress(ParallelError):  # they have heard of that already
                group.tell("")
    finally:
        group.close()


def _opened(group: RankGroup, open_engine: OpenEngine, progress: Progress | None) -> Engine:
    group.tell(json.dumps(["open", [], {}]))
    return cast(Engine, Rank0Engine(cast(RolloutEngine, open_engine(progress)), group))


def _follow(group: RankGroup, open_engine: OpenEngine) -> None:
    engine: Engine | None = None
    while message := group.tell(""):
        name, arguments, options = json.loads(message, object_hook=_from_json)
        if name == "open":
            engine = open_engine(None)
            continue
        try:
            getattr(engine, name)(*arguments, **options)
        except ParallelError:
            raise
        except (RolloutError, OSError, TimeoutError) as error:  # rank 0 has it as well
            log.debug("%s: %s", name, error)


class Rank0Engine:
    """Rank 0's engine; see `rollout.engine.protocol.Engine`. What changes it is told to all."""

    _told = methods_on(Ranks.EVERY)
    _own = methods_on(Ranks.FIRST)

    def __init__(self, engine: RolloutEngine, group: RankGroup) -> None:
        self._engine = engine
        self._group = group

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name in self._told:
            return partial(self._call, name)
        if name in self._own or not ismethod(found):
            return found
        raise InvalidInputError(
            name, "a call", "cannot be told to other ranks: call it on each of them"
        )

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        with self._engine.calls:  # refused before the others hear of it, or done by all
            self._group.tell(json.dumps([name, arguments, options], default=_to_json))
            return getattr(self._engine, name)(*arguments, **options)


def _to_json(value: Any) -> Any:
    if isinstance(value, SamplingParams):
        fields = asdict(value)
        fields["logit_bias"] = list(value.logit_bias.items())
        return {"SamplingParams": fields}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _from_json(fields: dict[str, Any]) -> Any:
    if fields.keys() != {"SamplingParams"}:
        return fields
    params = dict(fields["SamplingParams"])
    params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"]}
    return SamplingParams(**params)
