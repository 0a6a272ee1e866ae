"""The flat query rows of one step and what attention must know of them, on the host.

Legend: B entries, T query rows, N draft nodes, R sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.memory.slots import NULL_SLOT
from rollout.ops.paged_attention import AttentionPlan
from rollout.types import Batch, DraftTrees

_PLAN = ("rows_B", "starts_B", "run_lens_B", "q_offsets_B1", "node_offsets_B1", "node_masks_N",
         "node_slots_N")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """Per entry its causal run, then its draft nodes. See AttentionPlan for the last seven."""

    input_ids_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    slots_T: NDArray[np.int64]
    rows_B: NDArray[np.int32]
    starts_B: NDArray[np.int32]
    run_lens_B: NDArray[np.int32]
    q_offsets_B1: NDArray[np.int32]
    node_offsets_B1: NDArray[np.int32]
    node_masks_N: NDArray[np.int64]
    node_slots_N: NDArray[np.int32]
    sampled_R: NDArray[np.int64]  # rows to take logits of
    longest: int  # where the last run ends

    @staticmethod
    def of(
        batch: Batch, trees: DraftTrees, table: NDArray[np.int32], scored_from: int | None = None
    ) -> StepArrays:
        """``table``: req_to_token. ``scored_from``: take logits of run rows at that position or
        later; default: of the roots and nodes of entries that sample."""
        entries = batch.entries
        input_ids: list[NDArray] = []
        positions: list[NDArray] = []
        slots: list[NDArray] = []
        node_slots: list[NDArray] = []
        sampled: list[NDArray] = []
        offsets_B1 = np.zeros(len(entries) + 1, dtype=np.int32)
        total = 0
        for b, entry in enumerate(entries):
            first, last = int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1])
            num_nodes = last - first
            run = np.array(entry.request.tokens[entry.start : entry.end], dtype=np.int64)
            own_slots = entry.draft_slots[:num_nodes]
            input_ids += [run, trees.tokens_N[first:last]]
            positions += [
                np.arange(entry.start, entry.end),
                entry.end - 1 + trees.depths_N[first:last],
            ]
            slots += [table[entry.request.row, entry.start : entry.end], own_slots]
            node_slots.append(own_slots)
            end = total + entry.run_len + num_nodes
            if scored_from is not None:
                sampled.append(np.arange(total + max(0, scored_from - entry.start), end))
            elif entry.samples:
                sampled.append(np.arange(end - num_nodes - 1, end))
            total = end
            offsets_B1[b + 1] = total
        return StepArrays(
            input_ids_T=_flat(input_ids, np.int64),
            positions_T=_flat(positions, np.int64),
            slots_T=_flat(slots, np.int64),
            rows_B=np.array([entry.request.row for entry in entries], dtype=np.int32),
            starts_B=np.array([entry.start for entry in entries], dtype=np.int32),
            run_lens_B=np.array([entry.run_len for entry in entries], dtype=np.int32),
            q_offsets_B1=offsets_B1,
            node_offsets_B1=trees.offsets_B1.astype(np.int32),
            node_masks_N=trees.masks_N.view(np.int64),
            node_slots_N=_flat(node_slots, np.int32),
            sampled_R=_flat(sampled, np.int64),
            longest=max((entry.end for entry in entries), default=0),
        )

    @property
    def num_rows(self) -> int:
        """Of the entries; what comes behind is padding."""
        return int(self.q_offsets_B1[-1])

    def padded(self, rows: int, entries: int = 0, nodes: int = 0) -> StepArrays:
        """As many of each at least.

        Padding rows run token 0 at position 0, write to the null slot and see nothing. Padding
        entries have no rows, padding nodes are no entry's.
        """
        ends = int(self.q_offsets_B1[-1]), int(self.node_offsets_B1[-1])
        return replace(
            self,
            input_ids_T=_padded(self.input_ids_T, rows),
            positions_T=_padded(self.positions_T, rows),
            slots_T=_padded(self.slots_T, rows, NULL_SLOT),
            rows_B=_padded(self.rows_B, entries),
            starts_B=_padded(self.starts_B, entries),
            run_lens_B=_padded(self.run_lens_B, entries, 1),
            q_offsets_B1=_padded(self.q_offsets_B1, entries + 1, ends[0]),
            node_offsets_B1=_padded(self.node_offsets_B1, entries + 1, ends[1]),
            node_masks_N=_padded(self.node_masks_N, nodes, 1),
            node_slots_N=_padded(self.node_slots_N, nodes, NULL_SLOT),
        )

    def inputs(self) -> dict[str, NDArray]:
        """What a forward of these shapes reads, by field."""
        names = ("input_ids_T", "positions_T", "slots_T", *_PLAN)
        return {name: getattr(self, name) for name in names}


def attention_plan(
    tensors: dict[str, torch.Tensor], req_to_token: torch.Tensor, longest: int
) -> AttentionPlan:
    """Of `StepArrays.inputs`, as tensors."""
    plan: dict[str, Any] = {name: tensors[name] for name in _PLAN}
    return AttentionPlan(req_to_token=req_to_token, longest=longest, **plan)


def _flat(parts: list[NDArray], dtype: type) -> NDArray:
    return (np.concatenate(parts) if parts else np.zeros(0)).astype(dtype)


def _padded(array: NDArray, length: int, value: int = 0) -> NDArray:
    missing = length - array.size
    if missing <= 0:
        return array
    return np.concatenate([array, np.full(missing, value, dtype=array.dtype)])
