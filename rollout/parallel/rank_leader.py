"""Rank 0 leads the ranks that run the same rows: what it runs, they run as it says."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout.errors import EngineStateError, InvalidInputError, ParallelError
from rollout.parallel.rank_group import CLOSED, RankGroup, SingleRank

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of rank 0's lead: the result of its call, or why it failed."""

    result: Any = None
    error: str = ""


class RankLeader:
    """Messages of rank 0, which the other ranks run one after the other while they follow.

    A message is an object that both sides know; it is pickled, since these are processes of one
    program. ``group``: waits for as long as rank 0 has nothing to say.
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        self._group: RankGroup = group or SingleRank()
        self._depth = 0  # leads inside each other

    @property
    def is_followed(self) -> bool:
        """Whether other ranks run what rank 0 tells now."""
        return self._depth > 0 and self._group.size > 1

    def lead(self) -> None:
        """Let the other ranks follow until `end`, on rank 0; nothing inside another lead."""
        self._depth += 1

    def end(self, result: Any = None, error: str = "") -> None:
        """End what `lead` began: where it is the outermost, the others stop following.

        Raises what pickling the result does; the others hear of that.
        """
        try:
            message = pickle.dumps(Ended(result, error)) if self.is_followed else b""
        except Exception as unsent:
            self.end(error=f"its result cannot be sent: {unsent}")
            raise
        self._depth -= 1
        if not self._depth and message:
            self._group.broadcast_bytes(message)

    def run(self, call: Callable[[], T]) -> T:
        """Make a call that the other ranks follow; its result is theirs too."""
        with self._failure_told():
            result = call()
        self.end(result)
        return result

    @contextmanager
    def leading(self) -> Iterator[None]:
        """A context between `lead` and `end`."""
        with self._failure_told():
            yield
        self.end()

    @contextmanager
    def _failure_told(self) -> Iterator[None]:
        self.lead()
        try:
            yield
        except BaseException as error:
            with suppress(ParallelError):  # they have heard of that already
                self.end(error=f"{type(error).__name__}: {error}")
            raise

    def require_followed(self) -> None:
        """Raise EngineStateError where nobody follows."""
        if not self._depth:
            raise EngineStateError(
                "the other ranks do not follow this one: call generate on each of them, or "
                "engine.follow() there and here what they follow in `with engine.leading():`"
            )

    def tell(self, message: object) -> None:
        """Let the other ranks run a message, on rank 0.

        Raises EngineStateError where nobody follows, InvalidInputError for a message that cannot be
        pickled, ParallelError where a rank is lost.
        """
        self.require_followed()
        try:
            data = pickle.dumps(message)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            remedy = f"cannot be sent to the other ranks: {error}"
            raise InvalidInputError("arguments", type(message).__name__, remedy) from error
        self._group.broadcast_bytes(data)

    def messages(self) -> Iterator[Any]:
        """Rank 0's messages, as another rank receives them. The last is the `Ended` of its lead."""
        while True:
            message = pickle.loads(self._group.broadcast_bytes(b""))
            yield message
            if isinstance(message, Ended):
                return

    def close(self, reason: str = CLOSED) -> None:
        """Leave; see `RankGroup.close`. Where all is done the others stop following."""
        if reason == CLOSED and self.is_followed:
            self._depth = 0
            with suppress(ParallelError):
                self._group.broadcast_bytes(pickle.dumps(Ended()))
        self._group.close(reason)
