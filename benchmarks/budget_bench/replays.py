"""The choice of nodes on recorded rollouts, where forwards cost what a roofline says."""

from __future__ import annotations

import numpy as np
from replaying import Replay, replay
from table import Row, row
from traces import Trace

from budget_bench.priced_drafter import Pick, PricedDrafter, pick_all, pick_by_probability

NODES = 16
"""Most draft nodes per request and step."""

ACTIVE = 64
"""Sequences that run together."""

_MIN_PROBABILITY = 0.02  # the choice is to leave nodes out, not this


def replay_rows(trace: Trace, bar: float | None) -> list[Row]:
    """``bar``: least speedup over plain decoding of the same trace under the same prices."""
    plain, _ = _replay(trace, pick_all, nodes=0)
    rows = [row(f"replay of {trace.name}: plain", plain.price, "decode steps")]
    chosen, result = _replay(trace, pick_by_probability, nodes=NODES)
    steps = np.array(plain.price_of_step) / np.array(chosen.price_of_step)
    idle = chosen.num_steps_without_drafts / chosen.num_steps
    rows += [
        row(f"replay of {trace.name}: accept length", result.accept_length, "tokens"),
        row(f"replay of {trace.name}: verified", result.drafted, "nodes/request"),
        row(f"replay of {trace.name}: steps without drafts", idle, "share"),
        row(f"replay of {trace.name}: worst RL step", steps.min(), "x"),
    ]
    others: list[tuple[str, Pick, int]] = [
        ("8 nodes per request", pick_all, 8),
        ("16 nodes per request", pick_all, 16),
    ]
    for name, pick, nodes in others:
        drafter, _ = _replay(trace, pick, nodes=nodes)
        rows.append(row(f"replay of {trace.name}: {name}", plain.price / drafter.price, "x"))
    speedup = plain.price / chosen.price
    return [*rows, row(f"replay of {trace.name}: speedup", speedup, "x", bar)]


def _replay(trace: Trace, pick: Pick, *, nodes: int) -> tuple[PricedDrafter, Replay]:
    drafter = PricedDrafter(trace, pick, min_probability=_MIN_PROBABILITY)
    return drafter, replay(trace, drafter, budget=nodes, active=ACTIVE)
