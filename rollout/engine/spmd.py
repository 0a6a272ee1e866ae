"""Calls of an engine of several ranks: rank 0 makes them, the other ranks repeat them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from inspect import ismethod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from rollout.config import ModelConfig, ParallelConfig
from rollout.engine.call_messages import bytes_of, decoded_call, encoded_call
from rollout.engine.engine import RolloutEngine
from rollout.engine.protocol import Engine, ReplicaEngine, calls_of
from rollout.errors import InvalidInputError, ParallelError, RolloutError
from rollout.models.checkpoint import Progress
from rollout.models.head_parts import check_shares
from rollout.models.spec import ModelSpec
from rollout.parallel import RankGroup, is_launched, open_ranks, rank_of
from rollout.weights.rank_stream import RankStream
from rollout.weights.receiver import shared_source
from rollout.weights.source import WeightSource
from rollout.weights.update_calls import UpdateCalls
from rollout.weights.update_counts import UpdateCounts

log = logging.getLogger(__name__)

T = TypeVar("T")
OpenEngine = Callable[[Progress | None], Engine]

_PATIENCE = 30 * 86_400.0
"""Seconds that a rank waits for rank 0's next call: rank 0 may wait for its users."""


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


def open_leading(
    config: ParallelConfig, open_engine: OpenEngine, ranks: ExitStack
) -> RolloutEngine:
    """Open the engine on all ranks, of which this one is the first. Several ranks are one engine to
    the caller, and end when it is closed.

    ``ranks``: what the other ranks need, closed after the engine, and where it cannot be opened.
    Raises what ``open_engine`` does, and ParallelError where ranks do not come.
    """
    with ranks:
        engine = ranks.enter_context(leading(config, open_engine))(None)
        if isinstance(engine, Rank0Engine):
            engine.others = ranks.pop_all()
    return cast(RolloutEngine, engine)


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
    """Ignore signals while the context lasts: rank 0 says when to stop. Once it has ended, so has
    the connection to it."""
    is_main = threading.current_thread() is threading.main_thread()  # only it may have handlers
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    former = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, former, strict=True):
            signal.signal(number, handler)


def _opened(group: RankGroup, open_engine: OpenEngine, progress: Progress | None) -> Engine:
    group.broadcast_bytes(encoded_call("open"))
    try:
        engine = cast(RolloutEngine, open_engine(progress))
    except BaseException as error:  # the others are in the middle of it, and listen to nothing else
        group.close(f"it could not open its engine: {error!r}")
        raise
    return cast(Engine, Rank0Engine(engine, group))


def _follow(group: RankGroup, open_engine: OpenEngine) -> None:
    engine: Engine | None = None
    while message := group.broadcast_bytes(b""):
        name, arguments, options = decoded_call(message, group)
        if name == "open":
            engine = open_engine(None)
            continue
        try:
            with _shared_streams(arguments):
                getattr(engine, name)(*arguments, **options)
        except ParallelError:
            raise
        except (RolloutError, OSError, TimeoutError) as error:  # rank 0 has it as well
            log.debug("%s: %s", name, error)


class Rank0Engine(UpdateCalls):
    """Rank 0's engine; see `rollout.engine.protocol.Engine`.

    Calls that change it are broadcast to all ranks.
    """

    _broadcast = calls_of(ReplicaEngine, all_ranks=True)
    _own = calls_of(ReplicaEngine, all_ranks=False)

    def __init__(self, engine: RolloutEngine, group: RankGroup) -> None:
        self.others = ExitStack()  # closed after the engine
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

    def update_weights(self, source: WeightSource, /, **options: Any) -> UpdateCounts | None:
        """What is in this process alone goes through memory that all ranks of this host read."""
        return self._call("update_weights", shared_source(source, self._group), **options)

    def close(self) -> None:
        """Close every rank's engine: this one's also where others are lost."""
        with self._engine.calls:
            with suppress(ParallelError):
                self._group.broadcast_bytes(encoded_call("close"))
            self._engine.close()
        self.others.close()

    def _call(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        with self._engine.calls:  # refused before the others hear of it, or done by all
            self._group.broadcast_bytes(encoded_call(name, *arguments, **options))
            for argument in arguments:
                self._tell_bytes(argument)
            with _shared_streams(arguments):
                return getattr(self._engine, name)(*arguments, **options)

    def _tell_bytes(self, argument: object) -> None:
        try:
            for data in bytes_of(argument):
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
