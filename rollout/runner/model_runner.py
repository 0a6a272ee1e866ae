"""A batch and its draft trees become device tensors, hidden states and blocks of logits.

Legend: B entries, T query rows, R sampled rows, V vocabulary, F feature columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.memory.device_slot_table import DeviceSlotTable
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.kv_pool import KvPool
from rollout.memory.routes_pool import StepRoutes
from rollout.memory.state_pool import StatePool
from rollout.models.aux_hidden_states import AuxHiddenStateCollector, AuxHiddenStates
from rollout.models.causal_lm import CausalLM
from rollout.models.forward_context import StepAttention
from rollout.ops import gpu
from rollout.ops.gated_delta_rule.chunked import (
    MIN_ROWS,
    ChunkedKernel,
    ChunkedPlan,
    chunked_plan,
)
from rollout.ops.transfers import upload
from rollout.runner.batch_layout import StepArrays, attention_plan, padded
from rollout.runner.graphs import ForwardGraphs
from rollout.runner.logit_blocks import logit_blocks
from rollout.runner.step_states import StepStates, state_plan
from rollout.types import Batch, DraftTrees


@dataclass(frozen=True, slots=True)
class RunForward:
    """Rank 0's message to the ranks that run the same rows."""

    step: StepArrays[NDArray]
    features: AuxHiddenStates  # that rank 0 keeps of it


@dataclass(kw_only=True, slots=True)
class Forwarded:
    """The outputs of one forward. Its query rows are, per entry, the run's and then the draft
    nodes'."""

    features_TF: torch.Tensor  # model dtype; no columns where none were asked for; until the next
    offsets_B1: NDArray[np.int32]  # entry b owns query rows [offsets[b], offsets[b + 1])


class ModelRunner:
    """Runs the target over a batch.

    ``minimum_rows`` is the least number of rows for which this processor's matrix products treat
    every row alike; shorter steps are padded with rows that write to the null slot and are never
    read.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_pool: KvPool,
        memory: KVCacheManager,
        state_pool: StatePool | None = None,
        minimum_rows: int,
        device: torch.device,
        features: AuxHiddenStates | None = None,
        graphs: ForwardGraphs | None = None,
        chunked_kernel: ChunkedKernel | None = None,
    ) -> None:
        """
        Args:
            state_pool: where the model has recurrent layers.
            features: hidden states that every forward keeps; default: none.
            graphs: capture forwards; default: each is launched anew.
            chunked_kernel: for long runs of recurrent layers; default: row after row.
        """
        self.model = model
        self._kv_pool = kv_pool
        self._state_pool = state_pool
        self._ranks = model.ranks
        self._req_to_token = memory.req_to_token.table
        self._table = DeviceSlotTable(memory, device, is_copy=model.ranks.tensor.size > 1)
        self._windows = memory.windows  # layers with a window have slots of their own; None: not
        self._window_table = None
        if memory.windows is not None:
            self._window_table = DeviceSlotTable(memory, device, memory.windows)
        self._routes_pool = memory.routes
        self._minimum_rows = minimum_rows
        self._device = device
        self._graphs = graphs
        self._chunked_kernel = chunked_kernel
        self.features = features or AuxHiddenStates()

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        trees: DraftTrees,
        take_logits: Callable[[torch.Tensor], object],
        *,
        scored_from: int | None = None,
    ) -> Forwarded:
        """Run a batch and its trees. Returns the features of all rows.

        As a side effect the keys and values of all query rows are in their slots, with what routers
        chose where that is kept, and so are the states that the entries have slots for. On a GPU
        nothing waits.

        Args:
            take_logits: called with the logits [R, V], in the model's dtype, of each entry's root
                and draft nodes in order: block by block (see `logit_blocks`), each gone with the
                next.
            scored_from: logits of each run row at that position or after instead.
        """
        step = StepArrays.of(batch, trees, self._req_to_token, scored_from)
        if self._state_pool is not None:
            step = step.with_states(batch, trees)
        self._kv_pool.note_forward(step.slots_T)
        changes = self._table.changes(step.rows_B, step.starts_B, step.ends_B)
        of_windows = None
        if self._windows is not None and self._window_table is not None:
            step = step.with_windows(self._windows.slot_of)
            of_windows = self._window_table.changes(step.rows_B, step.starts_B, step.ends_B)
            step.window_table = of_windows.writes
        left, step.table = step.sampled_R.size, changes.writes
        step.sampled_R = self._head_rows(step.sampled_R)

        def take(logits_RV: torch.Tensor) -> None:
            nonlocal left
            own_RV = logits_RV[:left]  # padding comes last
            left -= len(own_RV)
            take_logits(own_RV)

        with self._ranks.telling(RunForward(step, self.features)):
            features_TF, routes_TC = self.run(step, take, self.features)
        self._table.note(changes)
        if self._window_table is not None and of_windows is not None:
            self._window_table.note(of_windows)
        if self._routes_pool is not None:
            self._routes_pool.put(step.slots_T, routes_TC[: step.num_rows])
        return Forwarded(
            features_TF=features_TF[: step.num_rows],
            offsets_B1=step.q_offsets_B1,
        )

    @torch.inference_mode()
    def run(
        self,
        step: StepArrays[NDArray],
        take_logits: Callable[[torch.Tensor], object],
        features: AuxHiddenStates,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and routes, padding included. All ranks that run the same rows make this
        call.

        ``features``: those of rank 0, which are a part of every rank's key of a graph, so that all
        capture and replay alike.
        """
        sent = None
        chunks = self._chunks(step)
        if self._graphs is not None and chunks is None:
            # Calls on a CPU hold the number of threads.
            threads = 0 if gpu.runs_on(self._device) else torch.get_num_threads()
            sent = self._graphs.send(step, (features, threads))
        inputs: StepArrays[torch.Tensor]
        if self._graphs is not None and sent is not None:
            inputs = sent.inputs
            self._apply(inputs)
            hidden_TE, features_TF, routes_TC = self._graphs.run(sent, self._hidden)
        else:
            inputs = upload(step.padded(self._minimum_rows), self._device)
            self._apply(inputs)
            hidden_TE, features_TF, routes_TC = self._hidden(inputs, chunks, step.num_rows)
        for rows in logit_blocks(len(inputs.sampled_R)):
            take_logits(self.model.logits(hidden_TE[inputs.sampled_R[rows]]))
        return features_TF, routes_TC

    def _hidden(
        self,
        inputs: StepArrays[torch.Tensor],
        chunks: ChunkedPlan | None = None,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, features and routes [T, C] (see StepRoutes), padding included.

        ``num_rows``: without padding. One captured forward is replayed for any number of them.
        """
        plan, windowed = attention_plan(vars(inputs), self._table.tensor), None
        if inputs.windows is not None and self._window_table is not None:
            of_windows = {**vars(inputs), "node_slots_N": inputs.windows.node_slots_N}
            window_plan = attention_plan(of_windows, self._window_table.tensor)
            windowed = inputs.windows.slots_T, window_plan
        attention = StepAttention(
            keys=self._kv_pool.keys,
            values=self._kv_pool.values,
            slots_T=inputs.slots_T,
            plan=plan,
            scale=self.model.spec.attention_scale,
            windowed=windowed,
        )
        collector = self._collector(len(inputs.input_ids_T))
        routes = None if self._routes_pool is None else StepRoutes()
        hidden_TE = self.model.forward(
            inputs.input_ids_T,
            inputs.positions_T,
            attention,
            collector,
            states=self._states(inputs, chunks),
            routes=routes,
            num_rows=num_rows,
        )
        none = hidden_TE[:, :0]
        features_TF = none if collector is None else collector.features_TF
        return hidden_TE, features_TF, none if routes is None else routes.joined()

    def _apply(self, inputs: StepArrays[torch.Tensor]) -> None:
        """Bring the device's tables up to date."""
        self._table.apply(inputs.table)
        if self._window_table is not None:
            self._window_table.apply(inputs.window_table)

    def _chunks(self, step: StepArrays[NDArray]) -> ChunkedPlan | None:
        """The chunks of long runs, where there is a kernel for them."""
        if self._chunked_kernel is None or step.run_lens_B.max(initial=0) < MIN_ROWS:
            return None
        states = upload(step.states, torch.device("cpu"))
        plan = state_plan(torch.from_numpy(step.q_offsets_B1), states)
        return chunked_plan(plan, self._device, self._chunked_kernel)

    def _states(
        self, inputs: StepArrays[torch.Tensor], chunks: ChunkedPlan | None
    ) -> StepStates | None:
        pool = self._state_pool
        if pool is None or inputs.states is None:
            return None
        return StepStates(
            convolutions=pool.convolutions,
            recurrent=pool.recurrent,
            plan=state_plan(inputs.q_offsets_B1, inputs.states),
            chunks=chunks,
        )

    def _collector(self, rows: int) -> AuxHiddenStateCollector | None:
        if not self.features.count:
            return None
        like = torch.empty(0, dtype=self.model.dtype, device=self._device)
        return AuxHiddenStateCollector(self.features, rows, self.model.spec.hidden_size, like)

    def _head_rows(self, sampled_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the head. Runs with zero rows as well: a sharded head is a collective."""
        return padded(sampled_R, self._minimum_rows) if sampled_R.size else sampled_R
