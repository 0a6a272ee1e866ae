"""Which keys and values of a draft belong to which request.

Legend: B requests, T query rows, S slots, Q rows of ``req_to_token``, K next tokens noted per slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rollout.errors import IntegrityError
from rollout.memory.cache import CacheMemory
from rollout.memory.kv_pool import KvPool
from rollout.models.draft_model import DraftSpec
from rollout.types import Request
from spec_workers.ragged import places_within


class DraftKv:
    """The KV pool of one draft runner and its own ``req_to_token``.

    The pool's slots are the target's of the same positions, so what the prefix cache keeps it keeps
    for the draft too; behind them lie scratch slots for tree nodes. A draft has read the token that
    follows a position, and siblings that share the position's slot may differ there. So a slot is
    a request's own when

    - the target has not written it since the draft did (``KvPool.writes_S``), and
    - the next tokens the draft read there are the request's.

    A row of ``table`` holds those slots alone, in the order of their positions: a position whose
    slot is not the request's own is not attended to. While a request runs on, its row grows at the
    end; it is made anew where ``CacheMemory.row_versions`` tells that the target's row changed.
    """

    def __init__(
        self,
        memory: CacheMemory,
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
        self.first_scratch = target_pool.num_slots + 1
        self.horizon = horizon
        self.pool = KvPool(
            num_layers=spec.num_layers,
            num_slots=target_pool.num_slots + num_scratch,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=device,
        )
        self._memory = memory
        self._target_writes_S = target_pool.writes_S
        self._read_writes_S = np.zeros_like(target_pool.writes_S)  # when the draft read the slot
        self._next_SK = np.full((self.first_scratch, horizon), -1, dtype=np.int32)
        self.table = np.zeros_like(memory.req_to_token.table)
        rows = memory.req_to_token.max_rows
        self.lens_Q = np.zeros(rows, dtype=np.int64)  # slots in each row of the table
        self._reached_Q = np.zeros(rows, dtype=np.int64)  # positions they were chosen from
        self._versions_Q = np.full(rows, -1, dtype=np.int64)  # of the target's row, likewise

    def target_slots(self, rows_T: NDArray[np.int64], positions_T: NDArray) -> NDArray[np.int32]:
        return self._memory.req_to_token.table[rows_T, positions_T]

    def follow(
        self, rows_B: NDArray[np.int64], ends_B: NDArray, tokens_B: Sequence[Sequence[int]]
    ) -> None:
        """Make each row of the table hold what is valid of the positions [0, end).

        ``tokens_B``: of each request, those at [0, end + K) as far as there are any.
        """
        changed_B = self._versions_Q[rows_B] != self._memory.row_versions[rows_B]
        # A step that failed is run again from where it began.
        changed_B |= self._reached_Q[rows_B] > ends_B
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
        self.lens_Q[row] = len(chosen)
        self._versions_Q[row] = self._memory.row_versions[row]

    def _is_current(self, slots: NDArray) -> NDArray[np.bool_]:
        read = self._read_writes_S[slots]
        return (read > 0) & (read == self._target_writes_S[slots])

    def place(self, rows_B: NDArray[np.int64], lens_B: NDArray, slots_T: NDArray) -> None:
        """Put slots about to be written behind those in the table; they count once `keep` says."""
        columns_T = np.repeat(self.lens_Q[rows_B], lens_B) + places_within(lens_B)
        self.table[np.repeat(rows_B, lens_B), columns_T] = slots_T

    def keep(
        self,
        rows_B: NDArray[np.int64],
        lens_B: NDArray,
        slots_T: NDArray,
        next_TK: NDArray[np.int32],
    ) -> None:
        """The slots placed last hold the draft's keys and values, with these next tokens read."""
        self._next_SK[slots_T] = next_TK
        self._read_writes_S[slots_T] = self._target_writes_S[slots_T]
        self.lens_Q[rows_B] += lens_B
        self._reached_Q[rows_B] += lens_B

    def forget(self) -> None:
        """Weights changed: nothing that was computed is read again."""
        self._read_writes_S[:] = 0
        self._versions_Q[:] = -1
        self.lens_Q[:] = 0

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise IntegrityError unless each row holds its own request's slots, in order. O(tokens).

        Between two steps; rows that were not followed since they changed are passed over.
        """
        for request in running:
            row = request.row
            if row < 0 or self._versions_Q[row] != self._memory.row_versions[row]:
                continue
            end = int(self._reached_Q[row])
            held = self.table[row, : self.lens_Q[row]]
            slots = self._memory.req_to_token.table[row, :end]
            position_of = {int(slot): position for position, slot in enumerate(slots)}
            positions = [position_of.get(int(slot), -1) for slot in held]
            if -1 in positions or positions != sorted(set(positions)):
                raise IntegrityError(f"row {row} of a draft holds other slots than the target's")
            if not self._is_current(held).all():
                raise IntegrityError(f"row {row} of a draft holds slots the target wrote since")
            for position, noted in zip(positions, self._next_SK[held].tolist(), strict=True):
                if noted != request.tokens[position + 1 : position + 1 + self.horizon]:
                    raise IntegrityError(f"row {row} of a draft has read {noted} after {position}")
