"""Finds the request that each row of vLLM's batch holds.

vLLM hands over rows of tokens without request ids. Rows move as others leave, requests that are
preempted come back in another row, and a chat's next turn begins with the tokens of the last. So a
request is recognised by what its row holds.

Legend: R rows of vLLM's arrays, B rows of a call, T last tokens of a row, N new tokens of a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.ops.ragged import offsets_of

_TAIL = 32
"""Last tokens that are compared where a request stays in its row. Two requests of equal length that
share so many at the same step would be drafted for alike."""

_FACTOR = 0x9E3779B97F4A7C15  # odd: multiplication by it loses no bit of 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RecognisedRows:
    """The requests in the rows of one call.

    A request's new tokens follow those it was known to have; a new one's follow its prompt.
    """

    ids_B: NDArray[np.int64]  # a number of each request, never used twice
    known_B: NDArray[np.int64]  # tokens it was known to have, or its prompt has
    is_new_B: NDArray[np.bool_]  # never seen before
    stayed_B: NDArray[np.bool_]  # in this row in the call before, and nothing was missed
    offsets_B1: NDArray[np.int64]  # row b has the new tokens [offsets[b], offsets[b + 1])
    tokens_N: NDArray[np.int32]
    forgotten: list[int]  # requests that were away for too long


class RequestRows:
    """Recognises requests by their tokens, from call to call.

    A row that does not continue its request is looked up among those that are away, by a hash of
    everything it holds: it continues the longest one that it begins with.
    """

    def __init__(self, max_rows: int, max_len: int, max_away: int) -> None:
        """
        Args:
            max_rows: rows of a call, at most.
            max_len: tokens of a row, at most.
            max_away: requests remembered that are in no row: preempted, or ended.
        """
        self._max_away = max_away
        self._powers = np.cumprod(np.full(max_len, _FACTOR, dtype=np.uint64))
        self._num_rows = 0
        self._ids_R = np.zeros(max_rows, dtype=np.int64)
        self._lengths_R = np.zeros(max_rows, dtype=np.int64)
        self._hashes_R = np.zeros(max_rows, dtype=np.uint64)
        self._tails_RT = np.zeros((max_rows, _TAIL), dtype=np.int32)
        self._away: dict[int, tuple[int, int]] = {}  # id -> length and hash, the longest away first
        self._next_id = 0

    def update(
        self,
        counts_B: NDArray[np.int64],
        lengths_B: NDArray[np.int64],
        token_ids_RL: NDArray[np.int32],
    ) -> RecognisedRows:
        """The requests of a call's rows.

        Args:
            counts_B: last tokens of each row that were sampled in this step.
            lengths_B: tokens of each row, those included.
        """
        size = counts_B.size
        known_B = lengths_B - counts_B
        is_new_B = np.zeros(size, dtype=bool)
        stayed_B = self._stayed(known_B, token_ids_RL)
        if size != self._num_rows or not stayed_B.all():
            self._leave(stayed_B)
            for row in np.flatnonzero(~stayed_B).tolist():
                known_B[row], is_new_B[row] = self._enter(row, token_ids_RL[row, : known_B[row]])
        offsets_B1, tokens_N = self._take(known_B, lengths_B, token_ids_RL)
        return RecognisedRows(
            ids_B=self._ids_R[:size].copy(),
            known_B=known_B,
            is_new_B=is_new_B,
            stayed_B=stayed_B,
            offsets_B1=offsets_B1,
            tokens_N=tokens_N,
            forgotten=self._forget(),
        )

    def _stayed(
        self, known_B: NDArray[np.int64], token_ids_RL: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        stayed_B = np.zeros(known_B.size, dtype=bool)
        both = min(known_B.size, self._num_rows)
        tails_BT = _tails(token_ids_RL, known_B[:both])
        stayed_B[:both] = self._lengths_R[:both] == known_B[:both]
        stayed_B[:both] &= (tails_BT == self._tails_RT[:both]).all(axis=1)
        return stayed_B

    def _leave(self, stayed_B: NDArray[np.bool_]) -> None:
        """Note the requests that are not in their rows any more as away."""
        for row in range(self._num_rows):
            if row >= stayed_B.size or not stayed_B[row]:
                content = int(self._lengths_R[row]), int(self._hashes_R[row])
                self._away[int(self._ids_R[row])] = content

    def _enter(self, row: int, tokens: NDArray[np.int32]) -> tuple[int, bool]:
        """Find the request of a row among those away, or begin a new one; the tokens that are
        known of it, and whether it is new."""
        hashes = np.cumsum(_terms(tokens) * self._powers[: tokens.size])
        found, known = -1, 0
        for request, (length, content) in self._away.items():
            if known < length <= tokens.size and int(hashes[length - 1]) == content:
                found, known = request, length
        is_new = found < 0
        if is_new:
            found, known = self._next_id, tokens.size
            self._next_id += 1
        else:
            del self._away[found]
        self._ids_R[row] = found
        self._hashes_R[row] = hashes[known - 1] if known else 0
        return known, is_new

    def _take(
        self,
        known_B: NDArray[np.int64],
        lengths_B: NDArray[np.int64],
        token_ids_RL: NDArray[np.int32],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The new tokens of all rows, which are known from now on: offsets [B + 1], tokens [N]."""
        size, sizes_B = known_B.size, lengths_B - known_B
        offsets_B1 = offsets_of(sizes_B)
        positions_N = np.arange(offsets_B1[-1]) + np.repeat(known_B - offsets_B1[:-1], sizes_B)
        tokens_N = token_ids_RL[np.repeat(np.arange(size), sizes_B), positions_N]
        sums_N1 = np.zeros(tokens_N.size + 1, dtype=np.uint64)
        np.cumsum(_terms(tokens_N) * self._powers[positions_N], out=sums_N1[1:])
        self._hashes_R[:size] += sums_N1[offsets_B1[1:]] - sums_N1[offsets_B1[:-1]]
        self._lengths_R[:size] = lengths_B
        self._tails_RT[:size] = _tails(token_ids_RL, lengths_B)
        self._num_rows = size
        return offsets_B1, tokens_N

    def _forget(self) -> list[int]:
        forgotten = list(self._away)[: max(0, len(self._away) - self._max_away)]
        for request in forgotten:
            del self._away[request]
        return forgotten


def _tails(token_ids_RL: NDArray[np.int32], lengths_B: NDArray[np.int64]) -> NDArray[np.int32]:
    """The last tokens of each row; of a shorter one its first token fills the places before."""
    positions_BT = np.maximum(lengths_B[:, None] + np.arange(-_TAIL, 0), 0)
    return token_ids_RL[np.arange(lengths_B.size)[:, None], positions_BT]


def _terms(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    return tokens.astype(np.uint64) + np.uint64(1)
