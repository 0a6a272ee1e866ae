"""Judges trees that were not verified by the tokens that were emitted.

What is emitted does not depend on drafts, so a tree is right as far as it agrees with it.

Legend: B entries, N draft nodes, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.types import DraftTrees, EntryResult


class Agreement(NamedTuple):
    right_N: NDArray[np.bool_]  # whether the node and all above it are what was emitted
    known_N: NDArray[np.bool_]  # False beyond the last token, and where the request ended


def agreement(trees: DraftTrees, results: Sequence[EntryResult]) -> Agreement:
    entries_N = np.repeat(np.arange(len(results)), np.diff(trees.offsets_B1))
    emitted_BL = np.full((len(results), max(1, int(trees.depths_N.max(initial=0)))), -1)
    for b, result in enumerate(results):
        tokens = result.token_ids[: emitted_BL.shape[1]]
        emitted_BL[b, : len(tokens)] = tokens
    emitted_N = emitted_BL[entries_N, trees.depths_N - 1]
    missed_N = trees.tokens_N != emitted_N
    beyond_N = missed_N & (emitted_N < 0)
    bits_N = _bits(trees, entries_N)
    missed_B, beyond_B = np.zeros((2, len(results)), dtype=np.uint64)
    np.bitwise_or.at(missed_B, entries_N[missed_N], bits_N[missed_N])
    np.bitwise_or.at(beyond_B, entries_N[beyond_N], bits_N[beyond_N])
    right_N = (trees.masks_N & missed_B[entries_N]) == 0
    wrong_N = (trees.masks_N & (missed_B & ~beyond_B)[entries_N]) != 0
    ended_B = np.array([result.finish_reason is not None for result in results], dtype=bool)
    return Agreement(right_N, (right_N | wrong_N) & ~ended_B[entries_N])


def accepted_in_hindsight(
    trees: DraftTrees, values_N: NDArray[np.floating], results: Sequence[EntryResult]
) -> NDArray[np.float64]:
    """Nodes of each entry's tree that would have been accepted: float64 (B,).

    Where a tree goes on beyond the last token emitted, what follows counts by ``values_N``, the
    probabilities of acceptance; where the request ended nothing follows.
    """
    right_N, known_N = agreement(trees, results)
    entries_N = np.repeat(np.arange(len(results)), np.diff(trees.offsets_B1))
    accepted_B = np.bincount(entries_N[right_N], minlength=len(results)).astype(np.float64)
    lengths_B = np.array([len(result.token_ids) for result in results], dtype=np.int64)
    ended_B = np.array([result.finish_reason is not None for result in results], dtype=bool)
    accepted_B[ended_B] = np.minimum(accepted_B, np.maximum(lengths_B - 1, 0))[ended_B]
    is_last_N = right_N & known_N & (trees.depths_N == lengths_B[entries_N])
    bits_N = _bits(trees, entries_N)
    for node in np.flatnonzero(is_last_N):
        own = slice(*trees.offsets_B1[entries_N[node] : entries_N[node] + 2])
        below = (trees.masks_N[own] & bits_N[node]) != 0
        value = float(values_N[node])
        if value > 0:
            follows = float(values_N[own][below].sum()) / value - 1.0  # itself left out
            accepted_B[entries_N[node]] += follows
    return accepted_B


def _bits(trees: DraftTrees, entries_N: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Each node's own bit in the masks of its entry."""
    numbers_N = np.arange(trees.num_nodes) - trees.offsets_B1[entries_N] + 1
    return np.left_shift(np.uint64(1), numbers_N.astype(np.uint64))
