"""Ranks of one program: rank 0 opens engines and leads, the others follow each to its end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch

from rollout.config import ModelConfig, ParallelConfig
from rollout.engine.engine import RolloutEngine
from rollout.engine.following_rank import FollowingRank
from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError, ParallelError
from rollout.models.checkpoint import Progress
from rollout.models.head_parts import check_shares
from rollout.models.spec import ModelSpec
from rollout.parallel import ModelRanks, is_launched, open_ranks, rank_of

T = TypeVar("T")
OpenEngine = Callable[[Progress | None], Engine]

_OPEN = "open"
"""The message at which the others open their part of an engine."""


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
    """Run ``lead`` on rank 0 and return its result; the others follow its engines and return None.

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
    ranks = open_ranks(config, torch.device("cpu"))
    ranks.leader.lead()
    try:
        yield partial(_opened, ranks, open_engine)
    finally:
        with suppress(ParallelError):  # they have heard of that already
            ranks.leader.end()
        ranks.close()


def open_leading(
    config: ParallelConfig, open_engine: OpenEngine, ranks: ExitStack
) -> RolloutEngine:
    """Open the engine on all ranks, of which this one is the first. Several ranks are one engine to
    the caller, and end when it is closed.

    ``ranks``: what the other ranks need, closed after the engine, and where it cannot be opened.
    Raises what ``open_engine`` does, and ParallelError where ranks do not come.
    """
    with ranks:
        opened = ranks.enter_context(leading(config, open_engine))(None)
        engine = cast(RolloutEngine, opened)
        engine.when_closed.push(ranks.pop_all())
    return engine


def follow(config: ParallelConfig, open_engine: OpenEngine) -> None:
    """Follow the engines that rank 0 opens until it ends.

    Raises what ``open_engine`` does, and ParallelError where a rank is lost.
    """

    def run(_: object) -> None:
        with closing(cast(FollowingRank, open_engine(None))) as rank:
            rank.follow()

    ranks = open_ranks(config, torch.device("cpu"))
    try:
        with _signals_ignored():
            ranks.follow(run)
    finally:
        ranks.close()


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


def _opened(ranks: ModelRanks, open_engine: OpenEngine, progress: Progress | None) -> Engine:
    """The others follow the engine until it is closed."""
    with ranks.telling(_OPEN):
        engine = cast(RolloutEngine, open_engine(progress))
    engine.worker.ranks.leader.lead()
    return engine
