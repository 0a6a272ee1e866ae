"""The number of CPU threads that runs a model's forwards fastest, measured as an engine starts.

Two threads are faster than one on idle cores, and up to three times slower where another process
has one of the cores: in every product each waits for the other.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch

from spec_workers.target.trial_forwards import TrialForwards

log = logging.getLogger(__name__)

_TURNS = 5  # of which the median counts: two may meet a busy moment
_SECONDS = 1.0  # no forward begins later than this: a start takes some six
_SWITCH_RATIO = 0.9  # of the time with torch's own number: the process may have other work as well
_CPUS = Path("/sys/devices/system/cpu")


def may_choose_threads() -> bool:
    """Whether several numbers are possible, and torch has the one that it begins with."""
    if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return False
    return 1 < torch.get_num_threads() in _default_numbers()


def choose_threads(forwards: TrialForwards) -> None:
    """Let torch use fewer threads than now if forwards are clearly faster with them.

    Nothing changes where one turn of all forwards takes longer than a second.
    """
    before = torch.get_num_threads()
    try:
        times = _milliseconds(forwards, before)
    finally:
        torch.set_num_threads(before)
    if before not in times or len(times) < 2:
        return
    best = min(times, key=times.__getitem__)
    if times[best] < _SWITCH_RATIO * times[before]:
        torch.set_num_threads(best)
    log.info(
        "CPU threads: %d (num_threads=N overrides); a forward takes %s",
        torch.get_num_threads(),
        ", ".join(f"{ms:.1f} ms with {count}" for count, ms in sorted(times.items())),
    )


def _milliseconds(forwards: TrialForwards, max_threads: int) -> dict[int, float]:
    """The geometric mean of the forwards' median times, by the number of threads.

    Numbers take turns, so that a busy moment spoils none of them alone. One that changes a bit of
    any logit is left out, and so is one that had no turn yet when the time was up.
    """
    expected = {rows: forward() for rows, forward in forwards.items()}
    counts = [max_threads >> halvings for halvings in range(max_threads.bit_length())]
    taken: dict[int, dict[int, list[float]]] = {n: defaultdict(list) for n in counts}
    deadline = time.perf_counter() + _SECONDS
    turns = ((n, rows) for _ in range(_TURNS) for n in counts for rows in forwards)
    for count, rows in turns:
        started = time.perf_counter()
        if started > deadline:
            break
        if count in taken:
            torch.set_num_threads(count)
            logits_RV = forwards[rows]()
            taken[count][rows].append((time.perf_counter() - started) * 1e3)
            if not torch.equal(_bits(logits_RV), _bits(expected[rows])):
                del taken[count]
    return {
        count: math.prod(map(median, by_rows.values())) ** (1 / len(by_rows))
        for count, by_rows in taken.items()
        if len(by_rows) == len(forwards) > 0
    }


def _bits(logits_RV: torch.Tensor) -> torch.Tensor:
    return logits_RV.view(torch.uint8)  # weights that are still to come may give NaN


def _default_numbers() -> set[int]:
    """The CPUs that the process may run on, and their cores: torch begins with either."""
    if not hasattr(os, "sched_getaffinity"):
        return {os.cpu_count() or 1}
    cpus = os.sched_getaffinity(0)
    siblings = [_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in cpus]
    return {len(cpus), len({path.read_text() for path in siblings if path.exists()})}
