"""A draft's ``req_to_token`` where its plans read it.

Legend: B requests, Q rows of the table, C places.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import gpu
from spec_workers.neural.draft_kv import DraftKv
from spec_workers.ragged import places_within


class DraftTable:
    """``tensor``, int32 [rows, max_context_len]: as the table of a `DraftKv`, on the device.

    On a GPU a copy that is sent the columns that changed: `DraftKv.unchanged_Q` counts those of
    each row that did not. On the CPU a view, and nothing is sent.
    """

    def __init__(self, kv: DraftKv, device: torch.device) -> None:
        self._kv = kv
        self._is_view = not gpu.runs_on(device)
        table = torch.from_numpy(kv.table)
        self.tensor = table if self._is_view else torch.zeros_like(table, device=device)

    def changes(self, rows_B: NDArray[np.int64], ends_B: NDArray) -> dict[str, NDArray]:
        """What the device must be told to hold columns [0, end) of the rows, each named once:
        ``table_places`` int64 [C], flat, and ``table_slots`` int32 [C]."""
        if self._is_view:
            return {}
        table = self._kv.table
        first_B = np.minimum(self._kv.unchanged_Q[rows_B], ends_B)
        lens_B = ends_B - first_B
        places_C = places_within(lens_B) + np.repeat(rows_B * table.shape[1] + first_B, lens_B)
        return {"table_places": places_C, "table_slots": table.reshape(-1)[places_C]}

    def apply(
        self, tensors: dict[str, torch.Tensor], rows_B: NDArray[np.int64], ends_B: NDArray
    ) -> None:
        """``tensors``: the changes of these rows, on the device."""
        if self._is_view:
            return
        self.tensor.view(-1).index_copy_(0, tensors["table_places"], tensors["table_slots"])
        self._kv.unchanged_Q[rows_B] = np.maximum(self._kv.unchanged_Q[rows_B], ends_B)
