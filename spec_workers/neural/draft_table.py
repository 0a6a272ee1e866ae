"""The slots that a draft's requests attend to, where its attention reads them.

Legend: B requests, C slots that changed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import gpu
from spec_workers.draft_tree import indices_within
from spec_workers.neural.draft_kv import DraftKv


class DraftTable:
    """``tensor``, int32 [rows, max_context_len]: as the table of a `DraftKv`, on the device.

    On a GPU a copy that is sent the columns that changed: `DraftKv.unchanged_Q` counts those of
    each row that did not. On the CPU a view, and nothing is sent.
    """

    def __init__(self, kv: DraftKv, device: torch.device, name: str) -> None:
        """``name``: tells its changes from those of other tables that are sent with them."""
        self._kv = kv
        self._index, self._slots = f"{name}_index", f"{name}_slots"
        self._is_view = not gpu.runs_on(device)
        table = torch.from_numpy(kv.table)
        self.tensor = table if self._is_view else torch.zeros_like(table, device=device)

    def changes(self, rows_B: NDArray[np.int64], ends_B: NDArray) -> dict[str, NDArray]:
        """The changes that make the device hold columns [0, end) of the rows, each named once:
        flat indices, int64 [C], and slots, int32 [C]."""
        if self._is_view:
            return {}
        table = self._kv.table
        first_B = np.minimum(self._kv.unchanged_Q[rows_B], ends_B)
        lens_B = ends_B - first_B
        index_C = indices_within(lens_B) + np.repeat(rows_B * table.shape[1] + first_B, lens_B)
        return {self._index: index_C, self._slots: table.reshape(-1)[index_C]}

    def apply(
        self, tensors: dict[str, torch.Tensor], rows_B: NDArray[np.int64], ends_B: NDArray
    ) -> None:
        """Apply the changes of these rows, which are among ``tensors``, on the device."""
        if self._is_view:
            return
        self.tensor.view(-1).index_copy_(0, tensors[self._index], tensors[self._slots])
        self._kv.unchanged_Q[rows_B] = np.maximum(self._kv.unchanged_Q[rows_B], ends_B)
