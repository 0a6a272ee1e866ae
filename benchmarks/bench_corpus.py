"""Question: how well does the n-gram corpus draft on recorded rollouts beside other projects'
drafters, and what does it cost by itself?

    python benchmarks/bench_corpus.py --trace FILE

Traces are recorded rollouts; without one, one is made up. Times are CPU times of the Python calls,
Python's garbage collector off. Bars: accept length and drafted nodes on the recorded traces. To
measure a drafter of your own, call `replaying.replay`.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

from harness.command import Command, Parts
from harness.rows import Row, row
from harness.timing import no_garbage_collection
from harness.traces import Trace, add_trace_option, load_traces
from peer_drafters import PEERS
from replaying import CorpusDrafter, Drafter, replay

BUDGET = 8
"""Draft nodes per request."""

ACTIVE = 64
"""Sequences that run together."""

FLOOR = 0.06
"""Least estimated probability of a corpus node."""

# Least accept length, most nodes drafted.
BARS = {"gsm_rollouts_t05": (2.9, 7.6), "procedural_groups": (4.6, 6.8)}


def drafter_rows(trace: Trace, make: Callable[[], Drafter], *, judged: bool) -> Iterator[Row]:
    least, most = BARS.get(trace.name, (None, None)) if judged else (None, None)
    with no_garbage_collection():
        result = replay(trace, make(), budget=BUDGET, active=ACTIVE)
    name = f"{trace.name}, {result.drafter}"
    yield row(f"{name}: accept length", result.accept_length, "tokens", least)
    yield row(f"{name}: drafted", result.drafted, "nodes/request", most, at_most=True)
    yield row(f"{name}: propose", result.propose_cost, "us/request")
    yield row(f"{name}: insert", result.insert_cost, "us/token")


def parts(options: argparse.Namespace) -> Parts:
    makers: dict[str, Callable[[], Drafter]] = {"corpus": partial(CorpusDrafter, FLOOR)}
    for package, make in PEERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed and left out", flush=True)
        else:
            makers[package] = make
    return {
        f"{trace.name}, {name}": partial(drafter_rows, trace, make, judged=name == "corpus")
        for trace in load_traces(options.trace)
        for name, make in makers.items()
    }


def make_command() -> Command:
    command = Command(__doc__)
    add_trace_option(command)
    return command


if __name__ == "__main__":
    make_command().run("n-gram corpus", parts)
