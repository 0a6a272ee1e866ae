"""A copy of req_to_token on a device, kept up to date by sending changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.window_slots import WindowSlots
from rollout.ops import gpu
from rollout.ops.ragged import ranges
from rollout.ops.transfers import A


@dataclass(kw_only=True)
class TableWrites(Generic[A]):
    """Slots, and the places in the table they go to. Filled by `DeviceSlotTable.changes`."""

    indices_C: A  # int64, in the flat table
    slots_C: A  # int32


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChanges:
    """The changes to send to the device before a batch runs. Legend: B entries, C table entries."""

    rows_B: NDArray[np.integer]
    versions_B: NDArray[np.int64]
    ends_B: NDArray[np.integer]
    writes: TableWrites[NDArray] | None  # None: nothing is sent


_NO_ROWS = np.zeros(0, dtype=np.int64)
_NOTHING = TableChanges(rows_B=_NO_ROWS, versions_B=_NO_ROWS, ends_B=_NO_ROWS, writes=None)


class DeviceSlotTable:
    """``tensor``, int32 [max_rows, max_context_len], equals the host's table where a batch reads
    it.

    Positions [0, known) of a row are up to date while KVCacheManager.row_versions is unchanged for
    the row: its entries of computed positions change only together with that version. Entries from
    the start of a run on may have changed, since a step that failed frees its slots. So a step
    sends [min(known, start), end): one or a few tokens, or all of a row that is new or has moved.
    On the CPU the tensor is a view of the host's table and nothing is sent, unless other ranks need
    it: then each has a copy, which rank 0 keeps up to date.

    The table of layers with a window names their slots, on the CPU too. Those of tokens behind a
    row's window are neither sent nor read.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        device: torch.device,
        windows: WindowSlots | None = None,
        *,
        is_copy: bool = False,
    ) -> None:
        """
        Args:
            windows: of layers that have slots of their own.
            is_copy: on the CPU too.
        """
        self._table = memory.req_to_token.table
        self._windows = windows
        self._versions_Q = memory.row_versions
        self._is_view = windows is None and not is_copy and not gpu.runs_on(device)
        if self._is_view:
            self.tensor = torch.from_numpy(self._table).to(device)
        else:
            self.tensor = torch.zeros(self._table.shape, dtype=torch.int32, device=device)
        self._flat = self.tensor.view(-1)
        self._known_Q = np.zeros(len(self._table), dtype=np.int64)
        self._known_versions_Q = np.full(len(self._table), -1, dtype=np.int64)

    def changes(
        self,
        rows_B: NDArray[np.integer],
        starts_B: NDArray[np.integer],
        ends_B: NDArray[np.integer],
    ) -> TableChanges:
        """The table entries to send before runs [start, end) of these rows are computed."""
        if self._is_view:
            return _NOTHING
        versions_B = self._versions_Q.take(rows_B)
        is_known_B = self._known_versions_Q.take(rows_B) == versions_B
        first_B = np.minimum(self._known_Q.take(rows_B) * is_known_B, starts_B)
        if self._windows is not None:
            first_B = np.maximum(first_B, starts_B - self._windows.sizes.window)
        row_firsts_B = rows_B * np.int64(self._table.shape[1])
        indices_C = ranges(row_firsts_B + first_B, ends_B - first_B)
        slots_C = self._table.take(indices_C)
        if self._windows is not None:
            slots_C = self._windows.slot_of.take(slots_C)
        writes: TableWrites[NDArray] = TableWrites(indices_C=indices_C, slots_C=slots_C)
        return TableChanges(rows_B=rows_B, versions_B=versions_B, ends_B=ends_B, writes=writes)

    def apply(self, writes: TableWrites[torch.Tensor] | None) -> None:
        """``writes``: those of the changes, on the device."""
        if writes is not None:
            self._flat.index_copy_(0, writes.indices_C, writes.slots_C)

    def note(self, changes: TableChanges) -> None:
        """The changes were applied."""
        if changes.writes is not None:
            self._known_Q[changes.rows_B] = changes.ends_B
            self._known_versions_Q[changes.rows_B] = changes.versions_B
