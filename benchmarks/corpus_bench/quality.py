"""Accept length on the traces beside the peers, and how far estimates can be believed."""

from __future__ import annotations

import numpy as np
from calibration import deciles, largest_gap, tenths
from drafters.registry import PEERS, make_drafter, missing
from numpy.typing import NDArray
from replaying import Replay, replay
from table import Row, row
from traces import SYNTHETIC, Trace

from corpus_bench.settings import Settings
from corpus_bench.timing import no_garbage_collection

# At 8 nodes and 64 active: least accept length, most nodes drafted.
BARS = {"gsm_rollouts_t05": (2.9, 7.6), "procedural_groups": (4.6, 6.8)}
NO_BARS = (None, None)

PEER_TOKENS = 100_000
"""Of the traces the peers replay in a quick run."""


def accept_rows(settings: Settings) -> tuple[list[Row], list[Replay]]:
    """Corpus and peers on every trace."""
    rows, results = [], []
    for trace in settings.traces:
        at_bars = settings.budget == 8 and settings.active == 64
        length_bar, drafted_bar = BARS.get(trace.name, NO_BARS) if at_bars else NO_BARS
        short = not settings.quick or trace.num_tokens <= PEER_TOKENS
        for name in ["corpus", *(PEERS if short else [])]:
            if reason := missing(name):
                print(reason)
                continue
            result = run(settings, name, trace, floor=settings.floor)
            title = f"{trace.name}, {result.drafter}"
            bar = (length_bar, drafted_bar) if name == "corpus" else NO_BARS
            rows += [
                row(f"{title}: accept length", result.accept_length, "tokens", bar[0]),
                row(f"{title}: drafted", result.drafted, "nodes/request", bar[1], at_most=True),
                row(f"{title}: propose", result.propose_cost, "us/request"),
                row(f"{title}: insert", result.insert_cost, "us/token"),
            ]
            results.append(result)
    return rows, results


def precision_rows(settings: Settings) -> tuple[list[Row], list[Replay]]:
    """Estimates of the corpus against what came, no node left out for a low estimate."""
    results = [run(settings, "corpus", trace, floor=0.0) for trace in settings.traces]
    rows = []
    for result in results:
        rows += gap_rows(result.trace.name, result.estimates_J, result.accepted_J)
    if len(results) > 1:
        estimates_J = np.concatenate([result.estimates_J for result in results])
        accepted_J = np.concatenate([result.accepted_J for result in results])
        rows += gap_rows("all traces", estimates_J, accepted_J)
    return rows, results


def run(settings: Settings, name: str, trace: Trace, *, floor: float) -> Replay:
    drafter = make_drafter(name, floor=floor)
    with no_garbage_collection():
        return replay(trace, drafter, budget=settings.budget, active=settings.active)


def gap_rows(
    name: str, estimates_J: NDArray[np.float32], accepted_J: NDArray[np.bool_]
) -> list[Row]:
    bar = None if name == SYNTHETIC else 0.05  # made up: too few nodes in the middle to learn from
    equal_counts = largest_gap(deciles(estimates_J, accepted_J))
    equal_widths = largest_gap(tenths(estimates_J, accepted_J))
    return [
        row(
            f"{name}: worst of ten equal bins off by",
            equal_counts,
            "probability",
            bar,
            at_most=True,
        ),
        row(
            f"{name}: worst of [0, 0.1), ... off by", equal_widths, "probability", bar, at_most=True
        ),
    ]
