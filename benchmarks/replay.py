"""Replays recorded rollouts through drafters: accept length, what it came from, and estimates.

    python benchmarks/replay.py --trace FILE --drafter corpus --drafter arctic --plot replay.png

A drafter is any object with the methods of `drafters.drafter.Drafter`; to measure one of your own,
call `replaying.replay`, or give it a name in
`drafters.registry`. Without a trace one is made up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from calibration import deciles, largest_gap
from drafters.drafter import Drafter
from drafters.isolated import IsolatedDrafter, Sees
from drafters.registry import DRAFTERS, make_drafter, missing
from plots import add_plot_option, plot_replays
from replaying import Replay, replay
from table import Row, finish, parser, row
from traces import Trace, load_traces


def replay_rows(result: Replay, *, detailed: bool = True) -> list[Row]:
    """The figures of one replay; ``detailed`` adds those by epoch, temperature and source."""
    trace = result.trace
    name = f"{trace.name}, {result.drafter}"
    tokens = trace.num_tokens
    rows = [
        row(f"{name}: accept length", result.accept_length, "tokens"),
        row(f"{name}: drafted", result.drafted, "nodes/request"),
    ]
    if not detailed:
        return rows
    rows += [
        row(f"{name}: propose", result.propose_cost, "us/request"),
        row(f"{name}: insert", result.insert_cost, "us/token"),
    ]
    for epoch, length in result.accept_length_by(trace.epoch_of_R).items():
        rows.append(row(f"{name}: epoch {epoch:g}", length, "tokens"))
    known = ~np.isnan(trace.temperature_of_R)
    if known.any():
        for temperature, length in result.accept_length_by(trace.temperature_of_R).items():
            rows.append(row(f"{name}: temperature {temperature:g}", length, "tokens"))
    if result.accepted_by_source is not None:
        copied = result.accepted_by_source
        for source, count in copied.items():
            rows.append(row(f"{name}: copied from {source}", count / tokens, "of tokens"))
        rest = 1 - sum(copied.values()) / tokens
        rows.append(row(f"{name}: copied from none", rest, "of tokens"))
    if len(result.estimates_J):
        gap = largest_gap(deciles(result.estimates_J, result.accepted_J))
        rows.append(row(f"{name}: worst decile of estimates off by", gap, "probability"))
    return rows


def ablation_rows(
    trace: Trace, make: Callable[[], Drafter], *, budget: int, active: int
) -> list[Row]:
    """Accept length with scopes taken away, for what a drafter does not tell itself."""
    rows = []
    for sees in Sees:
        result = replay(trace, IsolatedDrafter(make, sees), budget=budget, active=active)
        rows += replay_rows(result, detailed=False)
    return rows


def add_replay_options(arguments: argparse.ArgumentParser) -> None:
    """Those every benchmark that replays has."""
    arguments.add_argument(
        "--trace", type=Path, action="append", default=[], help="recorded rollouts (repeatable)"
    )
    arguments.add_argument("--budget", type=int, default=8, help="draft nodes per request")
    arguments.add_argument("--active", type=int, default=64, help="sequences of a batch")
    arguments.add_argument("--seed", type=int, default=0, help="of what is made up")
    add_plot_option(arguments)


def main() -> None:
    arguments = parser(__doc__)
    add_replay_options(arguments)
    arguments.add_argument(
        "--drafter", choices=DRAFTERS, action="append", help="repeatable; default: corpus"
    )
    arguments.add_argument("--floor", type=float, default=0.0, help="least estimate of a node")
    arguments.add_argument(
        "--external", type=Path, help="a trace whose responses the corpus holds beforehand"
    )
    arguments.add_argument(
        "--ablate", action="store_true", help="also replay with scopes taken away"
    )
    options = arguments.parse_args()
    results, rows = [], []
    for trace in load_traces(options.trace, options.seed):
        for name in options.drafter or ["corpus"]:
            if reason := missing(name):
                print(reason)
                continue

            def make(name: str = name) -> Drafter:
                return make_drafter(name, floor=options.floor, external=options.external)

            results.append(replay(trace, make(), budget=options.budget, active=options.active))
            rows += replay_rows(results[-1])
            if options.ablate:
                rows += ablation_rows(trace, make, budget=options.budget, active=options.active)
    if options.plot is not None:
        plot_replays(results, options.plot)
    finish("replay", rows, options.json)


if __name__ == "__main__":
    main()
