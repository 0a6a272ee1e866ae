"""Chooses the draft nodes of a batch that are worth verifying.

Legend: B entries of a batch, N draft nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Choice(NamedTuple):
    """The number of nodes bought for each entry, and their expected worth and cost."""

    counts_B: NDArray[np.int64]  # so many first nodes of each entry
    saved_ms: float  # milliseconds of plain decoding that those are expected to save
    step_ms: float  # milliseconds of the step with them


def choose_nodes(
    values_N: NDArray[np.floating],
    offsets_B1: NDArray[np.int64],
    token_ms_B: NDArray[np.float64],
    step_ms_N1: NDArray[np.float64],
) -> Choice:
    """The nodes that make the step progress fastest.

    Nodes are taken in the order of their worth; of all prefixes of that order the one with the most
    milliseconds saved per millisecond spent. Within an entry values do not grow, so an ancestor is
    always taken before its descendants.

    Args:
        values_N: probability that each node is accepted; within an entry non-increasing.
        offsets_B1: entry b owns nodes [offsets[b], offsets[b + 1]).
        token_ms_B: milliseconds of plain decoding that one emitted token of each entry saves.
        step_ms_N1: the step with 0, 1, ... draft nodes; without any it saves what it takes.
    """
    sizes_B = np.diff(offsets_B1)
    entry_N = np.repeat(np.arange(sizes_B.size), sizes_B)
    worth_N = values_N * token_ms_B[entry_N]
    order_N = np.argsort(-worth_N, kind="stable")  # ties: as they come, an ancestor first
    saved_N1 = np.zeros(values_N.size + 1)
    np.cumsum(worth_N[order_N], out=saved_N1[1:])
    best = int(np.argmax((step_ms_N1[0] + saved_N1) / step_ms_N1))
    counts_B = np.bincount(entry_N[order_N[:best]], minlength=sizes_B.size)
    return Choice(counts_B, float(saved_N1[best]), float(step_ms_N1[best]))


def falling(values_N: NDArray[np.floating], offsets_B1: NDArray[np.int64]) -> NDArray[np.float64]:
    """The values, each lowered to the least one before it within its entry. Values are in [0,
    1]."""
    sizes_B = np.diff(offsets_B1)
    # Entry b lives in [-2b, -2b + 1]: what an entry before it left is above all of its own.
    shift_N = 2.0 * np.repeat(np.arange(sizes_B.size), sizes_B)
    return np.minimum.accumulate(values_N - shift_N) + shift_N
