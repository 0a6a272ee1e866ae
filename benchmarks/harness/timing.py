"""Timing of calls, and comparisons of calls that take turns.

The speed of a shared machine wanders by tens of per cent over seconds. Calls that are compared
therefore take turns within one run, and a ratio is the median of neighbours' ratios: a ratio of
least times would compare a lucky moment of one with a lucky one of the other.

`cpu_clock` is this thread's: other processes do not count, nor do locks that are waited for. One
reading costs most of a microsecond, `clock_cost`, which short calls have taken off.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

Call = Callable[[], object]
Name = TypeVar("Name")
Argument = TypeVar("Argument")
Result = TypeVar("Result")

# glibc lets freed memory pile up to twice the largest block freed before; at its initial threshold,
# set so that it stays, memory goes back to the system at once: the dear case. Others ignore it.
_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(128 << 10)}

cpu_clock = time.thread_time_ns


def clock_cost() -> int:
    """Nanoseconds of CPU time between two readings with nothing in between."""
    return round(statistics.median(-cpu_clock() + cpu_clock() for _ in range(2001)))


def cpu_seconds(call: Call) -> float:
    """CPU time of one call that is long beside a reading of the clock."""
    start = cpu_clock()
    call()
    return (cpu_clock() - start) / 1e9


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


def in_fresh_process(call: Callable[[Argument], Result], argument: Argument) -> Result:
    """Run a module's function where nothing else has run before, Python's collector off.

    What memory costs depends on what was freed before: a heap full of holes hides growth, and keeps
    what is freed from going back to the system.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        patch.dict(os.environ, _ALLOCATOR),
        ProcessPoolExecutor(1, mp_context=spawn, initializer=gc.disable) as pool,
    ):
        return pool.submit(call, argument).result()


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
