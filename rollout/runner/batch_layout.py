"""The flat query rows of one step and what attention must know of them, on the host.

Legend: B entries, T query rows, N draft nodes, R sampled rows; A arrays or tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.memory.device_slot_table import TableWrites
from rollout.memory.slots import NULL_SLOT
from rollout.ops.paged_attention import AttentionPlan
from rollout.ops.ragged import offsets_of, ranges
from rollout.ops.state_plan import NO_STATE
from rollout.ops.transfers import A
from rollout.runner.step_states import StateInputs, state_inputs
from rollout.types import Batch, DraftTrees, Scheduled

_PLAN = ("rows_B", "starts_B", "run_lens_B", "q_offsets_B1", "node_offsets_B1", "node_masks_N",
         "node_slots_N")  # fmt: skip

_NO_SLOTS = np.zeros(0, dtype=np.int32)


@dataclass(kw_only=True)
class WindowInputs(Generic[A]):
    """The slots of layers with a window that have their own. Filled by
    `StepArrays.with_windows`."""

    slots_T: A  # int64
    node_slots_N: A  # int32


@dataclass(kw_only=True)
class StepArrays(Generic[A]):
    """The inputs of a forward: per entry its causal run, then its draft nodes. Filled by
    `StepArrays.of`, but for those that may be missing. Arrays are never written to.

    What captured forwards read comes first, in order: see `GraphRunner.send`.
    """

    input_ids_T: A  # int64
    positions_T: A  # int64
    slots_T: A  # int64
    rows_B: A  # int32; for this and the next six see AttentionPlan
    starts_B: A  # int32
    run_lens_B: A  # int32
    q_offsets_B1: A  # int32
    node_offsets_B1: A  # int32
    node_masks_N: A  # int64
    node_slots_N: A  # int32
    states: StateInputs[A] | None = None  # `with_states`, for models with recurrent layers
    windows: WindowInputs[A] | None = None  # `with_windows`, where those have slots of their own
    sampled_R: A  # int64: rows to take logits of; `ModelRunner.forward` pads them
    table: TableWrites[A] | None = None  # `ModelRunner.forward`, for a device
    window_table: TableWrites[A] | None = None  # `ModelRunner.forward`, beside `windows`

    @staticmethod
    def of(
        batch: Batch, trees: DraftTrees, table: NDArray[np.int32], scored_from: int | None = None
    ) -> StepArrays[NDArray]:
        """``table``: req_to_token. ``scored_from``: take logits of run rows at that position or
        later; default: of the roots and nodes of entries that sample."""
        entries = batch.entries
        starts, run_lens = [e.start for e in entries], [e.run_len for e in entries]
        rows_B = np.array([e.request.row for e in entries], dtype=np.int32)
        starts_B = np.array(starts, dtype=np.int32)
        run_lens_B = np.array(run_lens, dtype=np.int32)
        if is_one_each := sum(run_lens) == len(entries):
            tokens = [e.request.tokens[e.start] for e in entries]
            run_offsets_B1 = np.arange(len(entries) + 1)
            positions_T, rows_T = starts_B.astype(np.int64), rows_B
        else:
            tokens = [token for e in entries for token in e.request.tokens[e.start : e.end]]
            run_offsets_B1 = offsets_of(run_lens_B)
            positions_T, rows_T = ranges(starts_B, run_lens_B), rows_B.repeat(run_lens_B)
        input_ids_T = np.array(tokens, dtype=np.int64)
        slots_T = table[rows_T, positions_T].astype(np.int64)
        q_offsets_B1, node_slots_N = run_offsets_B1, _NO_SLOTS
        if trees.num_nodes:
            node_offsets_B1 = trees.offsets_B1
            q_offsets_B1 = run_offsets_B1 + node_offsets_B1
            node_lens_B = _sizes(trees)
            # The query rows of runs and of nodes: those of earlier entries come first.
            runs = q_offsets_B1[:-1]
            if not is_one_each:
                runs = np.arange(len(tokens)) + node_offsets_B1[:-1].repeat(run_lens_B)
            nodes = np.arange(trees.num_nodes) + run_offsets_B1[1:].repeat(node_lens_B)
            roots = (starts_B + run_lens_B - 1).repeat(node_lens_B)
            node_slots_N = _node_slots(entries, trees)
            input_ids_T = _merged(runs, input_ids_T, nodes, trees.tokens_N)
            positions_T = _merged(runs, positions_T, nodes, roots + trees.depths_N)
            slots_T = _merged(runs, slots_T, nodes, node_slots_N)
        if scored_from is not None:
            before_B = np.maximum(0, scored_from - starts_B)
            q_lens_B = q_offsets_B1[1:] - q_offsets_B1[:-1]
            sampled_R = _last_rows(q_offsets_B1, np.maximum(0, q_lens_B - before_B))
        elif is_one_each and all(e.samples for e in entries):
            sampled_R = np.arange(len(input_ids_T))
        else:
            samples_B = np.array([e.samples for e in entries], dtype=bool)
            node_lens_B = _sizes(trees)
            sampled_R = _last_rows(q_offsets_B1, (node_lens_B + 1) * samples_B)
        return StepArrays(
            input_ids_T=input_ids_T,
            positions_T=positions_T,
            slots_T=slots_T,
            rows_B=rows_B,
            starts_B=starts_B,
            run_lens_B=run_lens_B,
            q_offsets_B1=q_offsets_B1.astype(np.int32),
            node_offsets_B1=trees.offsets_B1.astype(np.int32),
            node_masks_N=trees.masks_N.view(np.int64),
            node_slots_N=node_slots_N,
            sampled_R=sampled_R,
        )

    def with_states(
        self: StepArrays[NDArray], batch: Batch, trees: DraftTrees
    ) -> StepArrays[NDArray]:
        """Add what recurrent layers read. ``batch`` and ``trees``: those the step was made of."""
        return replace(self, states=state_inputs(batch, trees, self.q_offsets_B1, self.num_rows))

    def with_windows(self: StepArrays[NDArray], slot_of: NDArray[np.int32]) -> StepArrays[NDArray]:
        """Add the slots of layers with a window. ``slot_of``: `WindowSlots.slot_of`."""
        windows = WindowInputs(
            slots_T=slot_of[self.slots_T].astype(np.int64), node_slots_N=slot_of[self.node_slots_N]
        )
        return replace(self, windows=windows)

    @property
    def num_rows(self: StepArrays[NDArray]) -> int:
        """Query rows of the entries, without padding."""
        return int(self.q_offsets_B1[-1])

    @property
    def ends_B(self: StepArrays[NDArray]) -> NDArray[np.int32]:
        """The position behind the last row of each run."""
        return self.starts_B + self.run_lens_B

    def padded(
        self: StepArrays[NDArray], rows: int, entries: int = 0, nodes: int = 0
    ) -> StepArrays[NDArray]:
        """Pads to at least these sizes.

        Padding rows run token 0 at position 0, write to the null slot and see nothing; they have no
        state and keep none. Padding entries have no rows, padding nodes are no entry's.
        """
        states = self.states
        if states is not None:
            states = StateInputs(
                sources_B=padded(states.sources_B, entries, NO_STATE),
                parents_T=padded(states.parents_T, rows, -1),
                targets_T=padded(states.targets_T, rows, NO_STATE),
            )
        windows = self.windows
        if windows is not None:
            windows = WindowInputs(
                slots_T=padded(windows.slots_T, rows, NULL_SLOT),
                node_slots_N=padded(windows.node_slots_N, nodes, NULL_SLOT),
            )
        ends = self.q_offsets_B1[-1], self.node_offsets_B1[-1]
        return StepArrays(
            input_ids_T=padded(self.input_ids_T, rows),
            positions_T=padded(self.positions_T, rows),
            slots_T=padded(self.slots_T, rows, NULL_SLOT),
            rows_B=padded(self.rows_B, entries),
            starts_B=padded(self.starts_B, entries),
            run_lens_B=padded(self.run_lens_B, entries, 1),
            q_offsets_B1=padded(self.q_offsets_B1, entries + 1, ends[0]),
            node_offsets_B1=padded(self.node_offsets_B1, entries + 1, ends[1]),
            node_masks_N=padded(self.node_masks_N, nodes, 1),
            node_slots_N=padded(self.node_slots_N, nodes, NULL_SLOT),
            sampled_R=self.sampled_R,
            states=states,
            windows=windows,
            table=self.table,
            window_table=self.window_table,
        )


def attention_plan(tensors: Mapping[str, Any], req_to_token: torch.Tensor) -> AttentionPlan:
    """The plan of a step whose `StepArrays` of tensors has these fields."""
    plan: dict[str, Any] = {name: tensors[name] for name in _PLAN}
    return AttentionPlan(req_to_token=req_to_token, **plan)


def _node_slots(entries: list[Scheduled], trees: DraftTrees) -> NDArray[np.int32]:
    """The first reserved slots of each entry, as many as it has nodes."""
    reserved = [entry.draft_slots for entry in entries]
    slots = np.concatenate(reserved)
    if slots.size == trees.num_nodes:
        return slots
    firsts_B1 = offsets_of(np.array([own.size for own in reserved]))
    return slots[ranges(firsts_B1[:-1], _sizes(trees))]


def _sizes(trees: DraftTrees) -> NDArray[np.int64]:
    """Nodes of each entry."""
    return trees.offsets_B1[1:] - trees.offsets_B1[:-1]


def _last_rows(offsets_B1: NDArray[np.int64], lens_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the last ``lens_B`` query rows of each entry."""
    return ranges(offsets_B1[1:] - lens_B, lens_B)


def _merged(
    runs: NDArray, of_runs: NDArray, nodes: NDArray, of_nodes: NDArray
) -> NDArray[np.int64]:
    merged_T = np.empty(runs.size + nodes.size, dtype=np.int64)
    merged_T[runs], merged_T[nodes] = of_runs, of_nodes
    return merged_T


def padded(array: NDArray, length: int, value: int = 0) -> NDArray:
    """The array, filled up with ``value`` to at least this length."""
    size = array.size
    if size >= length:
        return array
    longer = np.empty(length, dtype=array.dtype)
    longer[:size], longer[size:] = array, value
    return longer
