"""Prices of a batch's draft nodes, in milliseconds of plain decoding.

Legend: B entries of a batch, N draft nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types import Batch, Request
from spec_workers.budget.step_costs import StepCosts

_SHORTER = 0.8
"""The part of a token of the request thought last by which the batch gets shorter: who is last in
the end had fewer tokens accepted than most."""

_INERTIA = 4.0  # steps without drafts that a request's pace begins with


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of one batch, in milliseconds."""

    width: int  # requests sampled from
    decode_ms: float  # a plain decode step of them alone
    with_nodes_N1: NDArray[np.float64]  # this step with 0, 1, ... draft nodes, without drafting
    token_ms_B: NDArray[np.float64]  # of plain decoding that one emitted token of each saves

    @classmethod
    def of(cls, batch: Batch, costs: StepCosts) -> Prices:
        """The prices of a batch.

        A token saves its share of a plain step while requests wait. Where none waits the batch ends
        with its last request: a token saves its own row, and the rest of the step by the chance
        that its request ends last.
        """
        entries = batch.entries
        width = batch.num_sampling
        if not width:
            return cls(0, 0.0, np.zeros(1), np.zeros(len(entries)))
        run, nodes = batch.num_run_tokens, sum(entry.draft_slots.size for entry in entries)
        decode_ms = costs.plain.at(width)
        with_nodes_N1 = costs.with_nodes(run, nodes)
        token_ms_B = np.full(len(entries), decode_ms / width)
        if batch.tail is not None and nodes and width > 1:
            # Who accepts more than the others ends before them.
            remaining_B = np.array(
                [min(batch.tail.remaining(each.request)) / _pace(each.request) for each in entries]
            )
            longest = max(1.0, float(remaining_B.max()))
            # Drafts vary a request's steps by about the root of its length.
            is_last_B = np.exp((remaining_B - longest) / longest**0.5)
            alone_ms = costs.plain.at(1)
            row_ms = (decode_ms - alone_ms) / (width - 1)
            shared_ms = _SHORTER * (alone_ms - row_ms)
            own_ms_B = row_ms + shared_ms * is_last_B / is_last_B.sum()
            token_ms_B += (1.0 - batch.tail.replaced) * (own_ms_B - token_ms_B)
        return cls(width, decode_ms, with_nodes_N1, token_ms_B)

    @property
    def cheapest_ms(self) -> float:
        """The least that a draft node adds to the step; infinite where none can be added."""
        extra_ms_N = self.with_nodes_N1[1:] - self.with_nodes_N1[0]
        return float((extra_ms_N / np.arange(1, extra_ms_N.size + 1)).min(initial=np.inf))


def _pace(request: Request) -> float:
    """Tokens that a request emits in a step."""
    stats = request.stats
    return 1.0 + stats.accepted / (stats.verify_steps + _INERTIA)
