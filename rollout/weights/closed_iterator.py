"""Streams that end early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def closed_iterator(items: Iterable[T]) -> Iterator[Iterator[T]]:
    """Iterate, and tell a generator on leaving that nobody will ask for more.

    Its frame may outlive whoever iterates, in a traceback for one, and a sharded source has other
    ranks waiting in its collectives until it is closed.
    """
    iterator = iter(items)
    try:
        yield iterator
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
