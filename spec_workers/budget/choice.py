"""Which draft nodes of a batch are worth verifying.

Legend: B entries, N draft nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Choice(NamedTuple):
    counts_B: NDArray[np.int64]  # so many first nodes of each entry
    worth: float  # milliseconds of plain decoding that those are expected to spare
    cost: float  # milliseconds of the step with them


def choose_nodes(
    values_N: NDArray[np.floating],
    offsets_B1: NDArray[np.int64],
    worth_B: NDArray[np.float64],
    cost_ms: NDArray[np.float64],
    base_worth: float,
) -> Choice:
    """The nodes that make the step progress fastest.

    Nodes are taken by what they are expected to spare, most first; of all prefixes of that order
    the one with the most milliseconds spared per millisecond spent. Within an entry values do not
    grow, so an ancestor is always taken before its descendants.

    Args:
        values_N: probability that each node is accepted; within an entry non-increasing.
        offsets_B1: entry b owns nodes [offsets[b], offsets[b + 1]).
        worth_B: what one emitted token of each entry spares, in milliseconds of plain decoding.
        cost_ms: ``(N + 1,)``, the step with k draft nodes.
        base_worth: what the step spares without drafts.
    """
    sizes_B = np.diff(offsets_B1)
    entry_N = np.repeat(np.arange(sizes_B.size), sizes_B)
    spared_N = values_N * worth_B[entry_N]
    order_N = np.argsort(-spared_N, kind="stable")  # ties: as they come, an ancestor first
    worth = np.empty(values_N.size + 1)
    worth[0] = 0.0
    np.cumsum(spared_N[order_N], out=worth[1:])
    best = int(np.argmax((base_worth + worth) / cost_ms))
    counts_B = np.bincount(entry_N[order_N[:best]], minlength=sizes_B.size)
    return Choice(counts_B, float(worth[best]), float(cost_ms[best]))


def falling(values_N: NDArray[np.floating], offsets_B1: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each value lowered to the least one before it within its entry. Values are in [0, 1]."""
    sizes_B = np.diff(offsets_B1)
    # Entry b lives in [-2b, -2b + 1]: what an entry before it left is above all of its own.
    shift_N = 2.0 * np.repeat(np.arange(sizes_B.size), sizes_B)
    return np.minimum.accumulate(values_N - shift_N) + shift_N
