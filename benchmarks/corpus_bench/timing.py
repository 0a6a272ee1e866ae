"""Timing of short calls.

CPU time is this thread's: other processes on the machine do not count, nor do locks waited for. A
reading costs most of a microsecond here and there, which is taken off.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

cpu_clock = time.thread_time_ns


def clock_cost() -> int:
    """Nanoseconds of CPU time between two readings with nothing in between."""
    return round(statistics.median(-cpu_clock() + cpu_clock() for _ in range(2001)))


def cpu_seconds(call: Callable[[], object]) -> float:
    """Of one call, long enough not to mind the clock."""
    start = cpu_clock()
    call()
    return (cpu_clock() - start) / 1e9


def wall_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e9


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector would charge its pauses to whatever call it interrupts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tail_ratio(samples: Sequence[float]) -> float:
    """99.9th percentile over median."""
    return float(np.quantile(samples, 0.999) / np.median(samples))
