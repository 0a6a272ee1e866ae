"""Calls of an engine of several ranks: rank 0 makes them, the other ranks repeat them.

A call travels as JSON, and the tensors it brings as buckets behind it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from inspect import ismethod
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

import numpy as np
import torch

from rollout.config import ModelConfig, ParallelConfig
from rollout.engine.draft_corpus import CorpusDelta
from rollout.engine.engine import RolloutEngine
from rollout.engine.protocol import Engine, ReplicaEngine, calls_of
from rollout.errors import InvalidInputError, ParallelError, RolloutError
from rollout.models.checkpoint import Progress
from rollout.models.head_parts import check_shares
from rollout.models.spec import ModelSpec
from rollout.parallel import RankGroup, is_launched, open_ranks, rank_of
from rollout.types import SamplingParams
from rollout.weights.bucket import PackedBucket, offered_tensors
from rollout.weights.manifest import TensorSpec, dtype_name, named_dtype
from rollout.weights.rank_stream import RankStream

log = logging.getLogger(__name__)

T = TypeVar("T")
OpenEngine = Callable[[Progress | None], Engine]

_PATIENCE = 30 * 86_400.0
"""Seconds that a rank waits to be told what to do: rank 0 may have to wait for its users."""


def launch_ranks(ranks: ParallelConfig, model: ModelConfig, arguments: Sequence[str]) -> None:
    """Replace this process by the launcher of the command with these arguments, if several ranks
    are configured and none was launched.

    Raises InvalidInputError for a model that cannot be partitioned among so many ranks.
    """
    if ranks.size == 1 or is_launched():
        return
    check_ranks(ranks, model)
    launcher = [sys.executable, "-m", "rollout.parallel.launcher", str(ranks.size)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "rollout.cli", *arguments])


def check_ranks(ranks: ParallelConfig, model: ModelConfig) -> None:
    """Raises InvalidInputError for a model that cannot be partitioned among so many ranks."""
    if ranks.size > 1:
        check_shares(ModelSpec.read(Path(model.path)), ranks.size)


def run_spmd(
    config: ParallelConfig, open_engine: OpenEngine, lead: Callable[[OpenEngine], T]
) -> T | None:
    """Run ``lead`` on rank 0 and return its result; the others repeat its engine calls and return
    None.

    ``lead`` is handed the function that opens the engine, on all ranks then. Raises what both
    raise, and ParallelError where a rank is lost.
    """
    if config.size > 1 and is_launched():
        num_processes = int(os.environ["WORLD_SIZE"])
        if num_processes != config.size:
            remedy = f"must be the {num_processes} processes that were launched: they are one's"
            raise InvalidInputError("parallel.size", config.size, remedy)
    if rank_of(config):
        follow(config, open_engine)
        return None
    with leading(config, open_engine) as opened:
        return lead(opened)


@contextmanager
def leading(config: ParallelConfig, open_engine: OpenEngine) -> Iterator[OpenEngine]:
    """A context of all ranks, which end with it; rank 0 gets the function that opens the engine.

    Raises ParallelError where ranks do not come.
    """
    if config.size == 1:
        yield open_engine
        return
    group = open_ranks(config, torch.device("cpu")).all
    try:
        yield partial(_opened, group, open_engine)
    finally:
        with suppress(ParallelError):  # they have heard of that already
            group.broadcast_bytes(b"")
        group.close()


def follow(config: ParallelConfig, open_engine: OpenEngine) -> None:
    """Repeat rank 0's engine calls until it ends.

    Raises what ``open_engine`` does, and ParallelError where a rank is lost.
    """
    group = open_ranks(config, torch.device("cpu"), patience=_PATIENCE).all
    try:
        with _signals_ignored():
            _follow(group, open_engine)
    finally:
        group.close()


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """While the context lasts rank 0 alone says when to stop. Where that has ended, so has the
    connection to it."""
    is_main = threading.current_thread() is threading.main_thread()  # only it may have handlers
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    former = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, former, strict=True):
            signal.signal(number, handler)


def _opened(group: RankGroup, open_engine: OpenEngine, progress: Progress | None) -> Engine:
    group.broadcast_bytes(_message("open"))
    try:
        engine = cast(RolloutEngine, open_engine(progress))
    except BaseException as error:  # the others are in the middle of it, and listen to nothing else
        group.close(f"it could not open its engine: {error!r}")
        raise
    return cast(Engine, Rank0Engine(engine, group))


def _follow(group: RankGroup, open_engine: OpenEngine) -> None:
    engine: Engine | None = None
    while message := group.broadcast_bytes(b""):
        name, arguments, options = json.loads(message)
        if name == "open":
            engine = open_engine(None)
            continue
        arguments = [_decoded(each, group) for each in arguments]
        options = {option: _decoded(each, group) for option, each in options.items()}
        try:
            with _shared_streams(arguments):
                getattr(engine, name)(*arguments, **options)
        except ParallelError:
            raise
        except (RolloutError, OSError, TimeoutError) as error:  # rank 0 has it as well
            log.debug("%s: %s", name, error)


class Rank0Engine:
    """Rank 0's engine; see `rollout.engine.protocol.Engine`.

    Calls that change it are broadcast to all ranks.
    """

    _broadcast = calls_of(ReplicaEngine, all_ranks=True)
    _own = calls_of(ReplicaEngine, all_ranks=False)

    def __init__(self, engine: RolloutEngine, group: RankGroup) -> None:
        self._engine = engine
        self._group = group

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name in self._broadcast:
            return partial(self._call, name)
        if name in self._own or not ismethod(found):
            return found
        raise InvalidInputError(
            name, "a call", "cannot be broadcast to other ranks: call it on each of them"
        )

    def update_weights_from_tensor(
        self, /, named_tensors: Any, *, load_format: str | None = None, **options: Any
    ) -> None:
        """Buckets go through memory that all ranks of this host read."""
        stream = RankStream.from_rank_0(self._group, offered_tensors(named_tensors, load_format))
        told_format = "direct" if load_format == "direct" else None
        self._call("update_weights_from_tensor", stream, load_format=told_format, **options)

    def close(self) -> None:
        """Close every rank's engine: this one's also where others are lost."""
        with self._engine.calls:
            with suppress(ParallelError):
                self._group.broadcast_bytes(_message("close"))
            self._engine.close()

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        with self._engine.calls:  # refused before the others hear of it, or done by all
            self._group.broadcast_bytes(_message(name, *arguments, **options))
            for argument in arguments:
                self._tell_bytes(argument)
            with _shared_streams(arguments):
                return getattr(self._engine, name)(*arguments, **options)

    def _tell_bytes(self, argument: object) -> None:
        try:
            for data in _bytes_of(argument):
                self._group.broadcast_bytes(data)
        except BaseException as error:  # the others wait for the rest
            self._group.close(f"it failed in the middle of sending a call: {error!r}")
            raise


@contextmanager
def _shared_streams(arguments: Sequence[Any]) -> Iterator[None]:
    """A context for a call with these arguments on every rank: weights among them begin and end on
    all."""
    streams = [each for each in arguments if isinstance(each, RankStream)]
    for stream in streams:
        stream.open()
    try:
        yield
    except ParallelError:
        raise
    except BaseException as error:
        for stream in streams:
            stream.finish(f"it failed: {error}")
        raise
    for stream in streams:
        stream.finish()


def _message(name: str, *arguments: Any, **options: Any) -> bytes:
    """Raises InvalidInputError for an argument that cannot be sent."""
    told_options = {option: _encoded(each) for option, each in options.items()}
    call = [name, [*map(_encoded, arguments)], told_options]
    try:
        return json.dumps(call, default=_to_json).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            name, "a call", f"cannot be broadcast to other ranks: {error}; pass plain values"
        ) from error


def _encoded(value: Any) -> list[Any]:
    """The kind of an argument and its value in JSON, so that no caller's own object is taken for
    one of another kind."""
    if isinstance(value, SamplingParams):
        fields = asdict(value)
        fields["logit_bias"] = list(value.logit_bias.items())
        return ["params", fields]
    if isinstance(value, RankStream):
        manifest = value.known_manifest
        return ["weights", [value.is_stored, None if manifest is None else _encoded(manifest)]]
    if isinstance(value, PackedBucket):
        value.unpacked()  # refused before the others read it
        return ["bucket", value.layout]
    if _are_deltas(value):
        return ["deltas", len(value)]
    if isinstance(value, Mapping) and all(isinstance(it, TensorSpec) for it in value.values()):
        return ["manifest", [[name, it.shape, dtype_name(it.dtype)] for name, it in value.items()]]
    return ["", value]


def _bytes_of(argument: Any) -> Iterator[bytes]:
    """The bytes of an argument that follow the call."""
    if isinstance(argument, PackedBucket):
        yield argument.flat.tobytes()
    elif _are_deltas(argument):
        yield from (delta.to_bytes() for delta in argument)


def _are_deltas(value: object) -> TypeGuard[list[CorpusDelta]]:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, CorpusDelta) for each in value)


def _to_json(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no plain value")


def _decoded(encoded: list[Any], group: RankGroup) -> Any:
    kind, value = encoded
    if kind == "params":
        value["logit_bias"] = {int(token): bias for token, bias in value["logit_bias"]}
        return SamplingParams(**value)
    if kind == "manifest":
        return {name: TensorSpec(tuple(shape), named_dtype(it, name)) for name, shape, it in value}
    if kind == "weights":
        stored, manifest = value
        known = None if manifest is None else _decoded(manifest, group)
        return RankStream.of(group, known, stored=stored)
    if kind == "bucket":
        return PackedBucket(np.frombuffer(group.broadcast_bytes(b""), dtype=np.uint8), value)
    if kind == "deltas":
        return [CorpusDelta.from_bytes(group.broadcast_bytes(b"")) for _ in range(value)]
    return value
