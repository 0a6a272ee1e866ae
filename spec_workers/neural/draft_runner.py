"""One draft network with keys and values of its own: known positions, and nodes of a tree.

Legend: B requests, Q rows of ``req_to_token``, T query rows, N tree nodes, K next tokens noted per
slot, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.models.draft_model import DraftModel
from rollout.models.eagle.dflash import DFlash
from rollout.models.forward_context import StepAttention
from rollout.ops.paged_attention import AttentionPlan
from rollout.ops.ragged import offsets_of
from rollout.ops.transfers import upload
from rollout.runner.batch_layout import attention_plan
from rollout.runner.graphs.graph_runner import GraphRunner
from spec_workers.draft_tree import indices_within
from spec_workers.neural.draft_kv import DraftKv
from spec_workers.neural.draft_table import DraftTable

_GRAPH_ROWS = 16  # of a forward that is captured: more cost little else


@dataclass(kw_only=True, slots=True)
class KnownRuns:
    """Positions whose next tokens are known: a causal run of each request, T in all."""

    rows_B: NDArray[np.int64]  # of req_to_token
    starts_B: NDArray[np.int64]  # first position
    lens_B: NDArray[np.int64]  # positions, 0 too
    next_TK: NDArray[np.int32]  # the tokens after each position; the last is what it is run with
    tokens_B: list[list[int]]  # each request's at [0, start + K), as far as there are any


@dataclass(kw_only=True, slots=True)
class NodeRows:
    """New nodes of trees, one tree below the known positions of each request, T in all.

    A tree's nodes are numbered from 1 in the order they were run in; bit 0 of a mask stands for
    what is known and is always set. ``bands_B`` says whose scratch slots a tree has: the same in
    every call that makes it grow.
    """

    rows_B: NDArray[np.int64]  # of req_to_token; none of DraftKv.lens_Q[rows] may be 0
    bands_B: NDArray[np.int64]
    counts_B: NDArray[np.int64]  # nodes so far, new ones included
    new_B: NDArray[np.int64]  # so many last ones are run
    masks_N: NDArray[np.uint64]  # of all nodes so far: bit j, node j is on the path
    input_ids_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]


class DraftRunner:
    """Runs one DraftModel. Its KV, ``req_to_token`` and plans are its own."""

    def __init__(
        self,
        model: DraftModel,
        kv: DraftKv,
        *,
        number: int = 0,
        minimum_rows: int,
        nodes_per_tree: int,
        graphs: GraphRunner | None = None,
    ) -> None:
        """
        Args:
            number: of the runner in its chain.
            kv: with scratch slots for ``nodes_per_tree`` nodes of each band in use.
            minimum_rows: fewer are padded: the processor's products of fewer are slower.
            graphs: of forwards of a few rows of one request; default: none is captured.
        """
        self.model = model
        self.kv = kv
        self._number = number
        self.nodes_per_tree = nodes_per_tree
        self.table = DraftTable(kv, model.device, f"table_{number}")
        self._minimum_rows = minimum_rows
        self._graphs = graphs
        self._inputs_TE = torch.empty(
            _GRAPH_ROWS, model.spec.hidden_size, dtype=model.dtype, device=model.device
        )
        self.is_warm = True  # the last forward was not captured, nor in a new shape

    @torch.inference_mode()
    def extend(
        self, runs: KnownRuns, hidden_TE: torch.Tensor, *, last_alone: bool = False
    ) -> torch.Tensor:
        """Run known positions; their keys and values stay. Hidden states [T, E], T may be zero.

        Args:
            hidden_TE: what the network takes at each position.
            last_alone: return the hidden state of the last position of each run that has any. For
                other positions only keys and values are computed.
        """
        kv, rows_B, lens_B = self.kv, runs.rows_B, runs.lens_B
        kv.follow(rows_B, runs.starts_B, runs.tokens_B)
        positions_T = np.repeat(runs.starts_B, lens_B) + indices_within(lens_B)
        slots_T = kv.slots_of(rows_B, lens_B, positions_T)
        kv.append(rows_B, lens_B, slots_T)
        used = lens_B > 0  # a plan has no empty runs
        skips = last_alone and len(positions_T) > int(used.sum())
        plan = self._plan(
            rows_B=rows_B[used],
            starts_B=kv.lens_Q[rows_B[used]],
            run_lens_B=lens_B[used],
            query_lens_B=np.ones_like(lens_B[used]) if skips else lens_B[used],
        )
        last_R = np.cumsum(lens_B)[used] - 1 if skips else None
        hidden_TE = self._run(plan, runs.next_TK[:, -1], hidden_TE, positions_T, slots_T, last_R)
        kv.commit(rows_B, lens_B, slots_T, runs.next_TK)
        return hidden_TE

    @torch.inference_mode()
    def run_nodes(self, nodes: NodeRows, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Run new tree nodes. Hidden states [T, E]. The rows must have been followed.

        ``hidden_TE``: of each node's parent.
        """
        counts_B = nodes.counts_B
        scratch_B = self.kv.first_scratch + nodes.bands_B * self.nodes_per_tree
        within_N = indices_within(counts_B)
        slots_N = np.repeat(scratch_B, counts_B) + within_N
        is_new_N = within_N >= np.repeat(counts_B - nodes.new_B, counts_B)
        plan = self._plan(
            rows_B=nodes.rows_B,
            starts_B=self.kv.lens_Q[nodes.rows_B] - 1,
            run_lens_B=np.ones_like(counts_B),
            query_lens_B=nodes.new_B,
            node_lens_B=counts_B,
            node_masks_N=nodes.masks_N,
            node_slots_N=slots_N,
        )
        slots_T = slots_N[is_new_N]
        return self._run(plan, nodes.input_ids_T, hidden_TE, nodes.positions_T, slots_T)

    @torch.inference_mode()
    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """The first step's input [T, E] from the target's features; T may be zero."""
        return self.model.fuse(self._padded(features_TF))[: len(features_TF)]

    @torch.inference_mode()
    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits [R, D] of hidden states; R may be zero."""
        return self.model.logits(self._padded(hidden_RE))[: len(hidden_RE)]

    def forward(
        self,
        input_ids_T: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        plan: AttentionPlan,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run rows that are on the device already. Hidden states [T, E]. Nothing waits.

        ``rows_R``: return those of these rows alone, [R, E], which are the plan's query rows.
        """
        rows = len(input_ids_T if rows_R is None else rows_R)
        hidden_TE = self.model.forward(
            self._padded(input_ids_T),
            self._padded(hidden_TE),
            self._padded(positions_T),
            self._attention(slots_T, plan),
            None if rows_R is None else self._padded(rows_R),
        )
        return hidden_TE[:rows]

    def run_block(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Run the rows of blocks, which are on the device already. Hidden states [T, E]."""
        assert isinstance(self.model, DFlash)
        hidden_TE = self.model.draft(
            self._padded(input_ids_T), self._padded(positions_T), self._attention(slots_T, plan)
        )
        return hidden_TE[: len(input_ids_T)]

    def _attention(self, slots_T: torch.Tensor, plan: AttentionPlan) -> StepAttention:
        return StepAttention(
            keys=self.kv.pool.keys,
            values=self.kv.pool.values,
            slots_T=self._padded(slots_T),
            plan=plan,
            scale=self.model.spec.decoder.attention_scale,
        )

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows, filled up to the minimum with zeros: token 0, position 0, the null slot."""
        missing = self._minimum_rows - len(rows)
        if missing <= 0:
            return rows
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])

    def _run(
        self,
        plan: dict[str, NDArray],
        input_ids_T: NDArray,
        hidden_TE: torch.Tensor,
        positions_T: NDArray[np.int64],
        slots_T: NDArray,
        rows_R: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        rows_B = plan["rows_B"].astype(np.int64)
        ends_B = (plan["starts_B"] + plan["run_lens_B"]).astype(np.int64)
        arrays = plan | {
            "input_ids_T": input_ids_T.astype(np.int64),
            "positions_T": positions_T,
            "slots_T": slots_T.astype(np.int64),
        }
        if rows_R is not None:
            arrays["rows_R"] = rows_R
        is_few = len(rows_B) == 1 and len(input_ids_T) <= _GRAPH_ROWS
        sent = self._graphs.send(arrays) if self._graphs is not None and is_few else None
        self.is_warm = True
        if self._graphs is None or sent is None:
            tensors = upload(arrays | self.table.changes(rows_B, ends_B), self.model.device)
            self.table.apply(tensors, rows_B, ends_B)
            return self._sent(tensors, hidden_TE)
        inputs_TE = self._inputs_TE[: len(hidden_TE)]
        inputs_TE.copy_(hidden_TE)
        sizes = tuple(array.size for array in arrays.values())
        key = (self._number, *sizes, torch.get_num_threads())
        found = self._graphs.run(key, lambda: {"hidden_TE": self._sent(sent, inputs_TE)})
        self.is_warm = self._graphs.is_warm
        return found["hidden_TE"]

    def _sent(self, tensors: dict[str, torch.Tensor], hidden_TE: torch.Tensor) -> torch.Tensor:
        return self.forward(
            tensors["input_ids_T"],
            hidden_TE,
            tensors["positions_T"],
            tensors["slots_T"],
            attention_plan(tensors, self.table.tensor),
            tensors.get("rows_R"),
        )

    def _plan(
        self,
        *,
        rows_B: NDArray,
        starts_B: NDArray,
        run_lens_B: NDArray,
        query_lens_B: NDArray,
        node_lens_B: NDArray | None = None,
        node_masks_N: NDArray[np.uint64] | None = None,
        node_slots_N: NDArray | None = None,
    ) -> dict[str, NDArray]:
        """See AttentionPlan."""
        if node_lens_B is None or node_masks_N is None or node_slots_N is None:
            node_lens_B = np.zeros_like(rows_B)
            node_masks_N = np.zeros(0, dtype=np.uint64)
            node_slots_N = np.zeros(0, dtype=np.int64)
        return {
            "rows_B": rows_B.astype(np.int32),
            "starts_B": starts_B.astype(np.int32),
            "run_lens_B": run_lens_B.astype(np.int32),
            "q_offsets_B1": offsets_of(query_lens_B).astype(np.int32),
            "node_offsets_B1": offsets_of(node_lens_B).astype(np.int32),
            "node_masks_N": node_masks_N.view(np.int64),
            "node_slots_N": node_slots_N.astype(np.int32),
        }
