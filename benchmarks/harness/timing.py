"""Timing of calls, and comparisons of calls that take turns.

The speed of a shared machine wanders by tens of per cent over seconds. Calls that are compared
therefore take turns within one run, and a ratio is the median of neighbours' ratios: a ratio of
least times would compare a lucky moment of one with a lucky one of the other.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

Call = Callable[[], object]
Name = TypeVar("Name")


def wall_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector would charge its pauses to whatever call it interrupts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rotated(names: Sequence[Name], by: int) -> list[Name]:
    """The order of a repeat: nobody always has the first turn."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def in_turns(calls: Mapping[Name, Call], repeats: int, *, warm: int = 1) -> dict[Name, list[float]]:
    """Seconds of each call in each repeat, after ``warm`` repeats that do not count."""
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + warm):
        for name in rotated(list(calls), turn):
            elapsed = wall_seconds(calls[name])
            if turn >= warm:
                seconds[name].append(elapsed)
    return seconds


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median ratio of measurements that were made in pairs."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
