"""Question: how many tokens per forward do a drafter's trees give on recorded rollouts, what were
they copied from, and can its estimates be believed? No bars: those are in bench_corpus.py.

    python benchmarks/replay.py --trace FILE --drafter corpus --drafter prompt-lookup

A drafter is any object with the methods of `drafters.Drafter`; to measure one of your own, call
`replaying.replay`, or give it a name in `drafters`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np
from drafters import DRAFTERS, make_drafter, missing
from harness.command import Command, Parts
from harness.rows import Row, row
from harness.traces import Trace, add_trace_option, load_traces
from replaying import equal_counts, largest_gap, replay


def rows_of(trace: Trace, drafter: str, options: argparse.Namespace) -> Iterator[Row]:
    if reason := missing(drafter):
        print(reason)
        return
    made = make_drafter(drafter, options.floor)
    result = replay(trace, made, budget=options.budget, active=options.active)
    name = f"{trace.name}, {result.drafter}"
    yield row(f"{name}: accept length", result.accept_length, "tokens")
    yield row(f"{name}: drafted", result.drafted, "nodes/request")
    yield row(f"{name}: propose", result.propose_cost, "us/request")
    yield row(f"{name}: insert", result.insert_cost, "us/token")
    for epoch, length in result.accept_length_by(trace.epoch_of_R).items():
        yield row(f"{name}: epoch {epoch:g}", length, "tokens")
    if not np.isnan(trace.temperature_of_R).all():
        for temperature, length in result.accept_length_by(trace.temperature_of_R).items():
            yield row(f"{name}: temperature {temperature:g}", length, "tokens")
    if copied := result.accepted_by_source:
        tokens = trace.num_tokens
        for source, count in copied.items():
            yield row(f"{name}: copied from {source}", count / tokens, "of tokens")
        rest = 1 - sum(copied.values()) / tokens
        yield row(f"{name}: copied from none", rest, "of tokens")
    if len(result.estimates_J):
        bins = equal_counts(result.estimates_J)
        gap = largest_gap(bins, result.estimates_J, result.accepted_J)
        yield row(f"{name}: worst decile of estimates off by", gap, "probability")


def parts(options: argparse.Namespace) -> Parts:
    return {
        f"{trace.name}, {drafter}": partial(rows_of, trace, drafter, options)
        for trace in load_traces(options.trace)
        for drafter in options.drafter or ["corpus"]
    }


def main() -> None:
    command = Command(__doc__)
    add_trace_option(command)
    help = "repeatable; default: corpus"
    command.option("--drafter", [], choices=DRAFTERS, action="append", help=help)
    command.option("--budget", 8, help="draft nodes per request")
    command.option("--active", 64, help="sequences of a batch")
    command.option("--floor", 0.0, help="least estimate of a node")
    command.run("replay", parts)


if __name__ == "__main__":
    main()
