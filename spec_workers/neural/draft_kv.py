"""Ownership of a draft's keys and values: the slots that belong to each request.

Legend: B requests, T query rows, S slots, Q rows of ``req_to_token``, K next tokens noted per slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rollout.errors import IntegrityError
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.kv_pool import KvPool
from rollout.models.draft_model import DraftSpec
from rollout.types import Request
from spec_workers.draft_tree import indices_within


class DraftKv:
    """The KV pool of one draft runner and its own ``req_to_token``.

    The pool's slots are the target's of the same positions, so what the prefix cache retains is
    retained for the draft too; behind them lie scratch slots for tree nodes. A draft has read the
    token that follows a position, and siblings that share the position's slot may differ there. So
    a slot is a request's own when

    - the target has not written it since the draft did (``KvPool.writes_S``), and
    - the next tokens the draft read there are the request's.

    A row of ``table`` holds those slots alone, in the order of their positions: a position whose
    slot is not the request's own is not attended to. While a request runs on, its row grows at the
    end; it is made anew where ``KVCacheManager.row_versions`` tells that the target's row changed.

    With a horizon of K the last K - 1 computed positions wait for tokens, and meanwhile their slots
    may have become the prefix cache's, and others' too. What is written for those goes into slots
    that each row of the table has for itself: others must not find it, nor lose what they have.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        target_pool: KvPool,
        spec: DraftSpec,
        *,
        num_scratch: int,
        dtype: torch.dtype,
        device: torch.device,
        horizon: int = 1,
    ) -> None:
        """
        Args:
            num_scratch: slots for tree nodes, ``[first_scratch, first_scratch + num_scratch)``.
            horizon: K, the tokens behind a position that its keys and values depend on.
        """
        rows = memory.req_to_token.max_rows
        self.first_private = target_pool.num_slots + 1
        self.first_scratch = self.first_private + rows * (horizon - 1)
        self.horizon = horizon
        self.pool = KvPool(
            num_layers=spec.decoder.num_layers,
            num_slots=self.first_scratch - 1 + num_scratch,
            num_kv_heads=spec.decoder.num_kv_heads,
            head_dim=spec.decoder.head_dim,
            has_values=spec.decoder.latent is None,
            dtype=dtype,
            device=device,
        )
        self._memory = memory
        self._target_writes_S = target_pool.writes_S
        self._read_writes_S = np.zeros_like(target_pool.writes_S)  # when the draft read the slot
        self._next_SK = np.full((self.first_private, horizon), -1, dtype=np.int32)
        self.table = np.zeros_like(memory.req_to_token.table)
        self.lens_Q = np.zeros(rows, dtype=np.int64)  # slots in each row of the table
        self._reached_Q = np.zeros(rows, dtype=np.int64)  # positions they were chosen from
        self._last_Q = np.zeros(rows, dtype=np.int64)  # position of the last of them
        self._versions_Q = np.full(rows, -1, dtype=np.int64)  # of the target's row then
        self.unchanged_Q = np.zeros(rows, dtype=np.int64)  # columns, since `DraftTable` sent them

    def slots_of(
        self, rows_B: NDArray[np.int64], lens_B: NDArray, positions_T: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """The slots [T] to write the keys and values of positions to; entry b has lens_B of them.

        The target's slots, where no other request may have them.
        """
        rows_T = np.repeat(rows_B, lens_B)
        slots_T = self._memory.req_to_token.table[rows_T, positions_T]
        if self.horizon > 1:
            shared_B = [self._memory.shared_len(row) for row in rows_B.tolist()]
            behind_T = np.repeat(np.array(shared_B, dtype=np.int64), lens_B) - positions_T
            is_shared_T = behind_T > 0
            assert (behind_T < self.horizon).all(), "only positions that waited can be shared"
            private_T = self.first_private + (rows_T + 1) * (self.horizon - 1) - behind_T
            slots_T[is_shared_T] = private_T[is_shared_T]
        return slots_T

    def follow(
        self, rows_B: NDArray[np.int64], ends_B: NDArray, tokens_B: Sequence[Sequence[int]]
    ) -> None:
        """Make each row of the table hold what is valid of the positions [0, end).

        ``tokens_B``: of each request, those at [0, end + K) as far as there are any.
        """
        changed_B = self._versions_Q[rows_B] != self._memory.row_versions[rows_B]
        # A step that failed is run again from where it began.
        changed_B |= (self._reached_Q[rows_B] > ends_B) | ~self._is_followed(rows_B)
        for b in np.flatnonzero(changed_B).tolist():
            self._choose(int(rows_B[b]), int(ends_B[b]), tokens_B[b])
        # What the target computed since the last time and the draft did not read is left out.
        self._reached_Q[rows_B] = ends_B

    def _choose(self, row: int, end: int, tokens: Sequence[int]) -> None:
        known = max(0, min(end, len(tokens) - self.horizon))
        slots = self._memory.req_to_token.table[row, :known]
        following = np.array(tokens[1 : known + self.horizon], dtype=np.int32)
        own = self._is_current(slots)
        if known:
            following_K = sliding_window_view(following, self.horizon)
            own &= (self._next_SK[slots] == following_K).all(axis=1)
        chosen = slots[own]
        self.table[row, : len(chosen)] = chosen
        self.unchanged_Q[row] = 0
        self.lens_Q[row] = len(chosen)
        self._last_Q[row] = np.flatnonzero(own)[-1] if len(chosen) else 0
        self._versions_Q[row] = self._memory.row_versions[row]

    def _is_current(self, slots: NDArray) -> NDArray[np.bool_]:
        read = self._read_writes_S[slots]
        return (read > 0) & (read == self._target_writes_S[slots])

    def _is_followed(self, rows_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row's last slot is still what the target computed its position in.

        Else a step failed after the draft had read what it gave, and was run again without it.
        """
        last_B = self.table[rows_B, self.lens_Q[rows_B] - 1]
        is_targets_B = (self.lens_Q[rows_B] > 0) & (last_B < self.first_private)
        is_same_B = last_B == self._memory.req_to_token.table[rows_B, self._last_Q[rows_B]]
        return ~is_targets_B | is_same_B & self._is_current(np.where(is_targets_B, last_B, 0))

    def append(self, rows_B: NDArray[np.int64], lens_B: NDArray, slots_T: NDArray) -> None:
        """Put slots about to be written behind those in the table; they count from `commit` on."""
        columns_T = np.repeat(self.lens_Q[rows_B], lens_B) + indices_within(lens_B)
        self.table[np.repeat(rows_B, lens_B), columns_T] = slots_T
        self.unchanged_Q[rows_B] = np.minimum(self.unchanged_Q[rows_B], self.lens_Q[rows_B])

    def commit(
        self,
        rows_B: NDArray[np.int64],
        lens_B: NDArray,
        slots_T: NDArray,
        next_TK: NDArray[np.int32],
    ) -> None:
        """The slots appended last hold the draft's keys and values, with these next tokens read."""
        is_target_T = slots_T < self.first_private
        slots_T, next_TK = slots_T[is_target_T], next_TK[is_target_T]
        self._next_SK[slots_T] = next_TK
        self._read_writes_S[slots_T] = self._target_writes_S[slots_T]
        self.lens_Q[rows_B] += lens_B
        self._reached_Q[rows_B] += lens_B
        grown_B = rows_B[lens_B > 0]
        self._last_Q[grown_B] = self._reached_Q[grown_B] - 1

    def forget(self) -> None:
        """Forget all keys and values, which were computed with other weights."""
        self._read_writes_S[:] = 0
        self._versions_Q[:] = -1
        self.lens_Q[:] = 0

    def positions(self, row: int) -> list[int]:
        """Positions whose slots the row holds, in its order; -1 for a slot that is not the
        row's."""
        own = self._memory.req_to_token.table[row, : self._reached_Q[row]].tolist()
        position_of = dict(zip(own, range(len(own)), strict=True))
        shared_len, width = self._memory.shared_len(row), self.horizon - 1
        first = self.first_private + row * width
        for slot in range(first, first + width):
            position_of[slot] = shared_len - width + slot - first
        return [position_of.get(slot, -1) for slot in self.table[row, : self.lens_Q[row]].tolist()]

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise IntegrityError unless each row holds its own request's slots, in order. O(tokens).

        Between two steps; rows that were not followed since they changed are passed over.
        """
        for request in running:
            row = request.row
            if row < 0 or self._versions_Q[row] != self._memory.row_versions[row]:
                continue
            # A step that failed may have left it ahead, or what it read may be computed again.
            is_ahead = self._reached_Q[row] > request.computed_len
            if is_ahead or not self._is_followed(np.array([row]))[0]:
                continue
            positions = self.positions(row)
            if -1 in positions or positions != sorted(set(positions)):
                raise IntegrityError(f"row {row} of a draft holds other slots than the target's")
            held = self.table[row, : self.lens_Q[row]]
            is_target = held < self.first_private
            held = held[is_target]
            if not self._is_current(held).all():
                raise IntegrityError(f"row {row} of a draft holds slots the target wrote since")
            positions = np.array(positions, dtype=np.int64)[is_target].tolist()
            for position, noted in zip(positions, self._next_SK[held].tolist(), strict=True):
                # After a step that failed the draft may know of tokens that are not booked yet.
                own = request.tokens[position + 1 : position + 1 + self.horizon]
                if noted[: len(own)] != own:
                    raise IntegrityError(f"row {row} of a draft has read {noted} after {position}")
