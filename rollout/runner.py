"""A batch and its draft trees become device tensors, hidden states and logits.

Legend: B entries, T query rows, N draft nodes, R sampled rows, V vocabulary, F feature columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollout.attention import PagedAttention, RecurrentStates, state_plan
from rollout.memory.kv_pool import KvPool
from rollout.memory.state_pool import StatePool
from rollout.models.causal_lm import CausalLM
from rollout.models.features import Features, Taps
from rollout.ops.paged_attention import AttentionPlan
from rollout.types import Batch, DraftTrees


@dataclass(kw_only=True, slots=True)
class QueryRows:
    """The flat query rows of one step: per entry its causal run, then its draft nodes."""

    input_ids: np.ndarray  # int64 [T], padded, as the next two are
    positions: np.ndarray  # int64 [T]
    slots: np.ndarray  # int64 [T]
    offsets: np.ndarray  # int32 [B + 1]
    sampled: np.ndarray  # int64 [R]: rows to take logits of


@dataclass(kw_only=True, slots=True)
class Forwarded:
    """What one forward gave. Its query rows are, per entry, the run's and then the draft nodes'."""

    logits_RV: torch.Tensor  # model dtype
    features_TF: torch.Tensor  # model dtype; no columns where none were asked for
    offsets_B1: np.ndarray  # int32: entry b owns query rows [offsets[b], offsets[b + 1])


class ModelRunner:
    """Runs the target over a batch.

    ``minimum_rows`` is the least number of rows for which this processor's matrix products treat
    every row alike; shorter steps are padded with rows that write to the null slot and that nobody
    reads.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_pool: KvPool,
        state_pool: StatePool | None = None,
        req_to_token: np.ndarray,
        minimum_rows: int,
        device: torch.device,
        features: Features | None = None,
    ) -> None:
        """
        Args:
            state_pool: where the model has recurrent layers.
            features: hidden states that every forward keeps; default: none.
        """
        self.model = model
        self._kv_pool = kv_pool
        self._state_pool = state_pool
        self._req_to_token = req_to_token
        self._req_to_token_device = torch.from_numpy(req_to_token).to(device)
        self._minimum_rows = minimum_rows
        self._device = device
        self.features = features or Features()

    @torch.inference_mode()
    def forward(
        self, batch: Batch, trees: DraftTrees, *, scored_from: int | None = None
    ) -> Forwarded:
        """Logits of each entry's root and draft nodes, in order, and the features of all rows.

        With ``scored_from``, logits of each run row at that position or after instead. As a side
        effect the keys and values of all query rows are in their slots, and so are the states that
        the entries have slots for.
        """
        rows = self._query_rows(batch, trees, scored_from)
        self._kv_pool.note_forward(rows.slots)
        attention = PagedAttention(
            keys=self._kv_pool.keys,
            values=self._kv_pool.values,
            slots_T=self._tensor(rows.slots),
            plan=self._attention_plan(batch, trees, rows.offsets),
            scale=self.model.spec.head_dim**-0.5,
        )
        taps = self._taps(int(rows.offsets[-1]))
        hidden_TE = self.model.forward(
            self._tensor(rows.input_ids),
            self._tensor(rows.positions),
            attention,
            taps,
            states=self._states(batch, trees, rows),
        )
        return Forwarded(
            logits_RV=self._logits(hidden_TE, rows.sampled),
            features_TF=hidden_TE[:0, :0] if taps is None else taps.features_TF,
            offsets_B1=rows.offsets,
        )

    def _states(self, batch: Batch, trees: DraftTrees, rows: QueryRows) -> RecurrentStates | None:
        pool = self._state_pool
        if pool is None:
            return None
        num_rows = len(rows.input_ids)
        return RecurrentStates(
            convolutions=pool.convolutions,
            recurrent=pool.recurrent,
            plan=state_plan(batch, trees, rows.offsets, num_rows, self._device),
        )

    def _taps(self, rows: int) -> Taps | None:
        if not self.features.count:
            return None
        like = torch.empty(0, dtype=self.model.dtype, device=self._device)
        return Taps(self.features, rows, self.model.spec.hidden_size, like)

    def _logits(self, hidden_TE: torch.Tensor, sampled: np.ndarray) -> torch.Tensor:
        """Of no rows too: a head that is spread over ranks waits for all of them."""
        rows = _padded(sampled, self._minimum_rows) if sampled.size else sampled
        return self.model.logits(hidden_TE[self._tensor(rows)])[: sampled.size]

    def _query_rows(self, batch: Batch, trees: DraftTrees, scored_from: int | None) -> QueryRows:
        input_ids: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        sampled: list[np.ndarray] = []
        offsets = np.zeros(len(batch.entries) + 1, dtype=np.int32)
        total = 0
        for b, entry in enumerate(batch.entries):
            first, last = int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1])
            num_nodes = last - first
            run = entry.request.tokens[entry.start : entry.end]
            input_ids += [np.array(run, dtype=np.int64), trees.tokens_N[first:last]]
            positions += [
                np.arange(entry.start, entry.end),
                entry.end - 1 + trees.depths_N[first:last],
            ]
            slots += [
                self._req_to_token[entry.request.row, entry.start : entry.end],
                entry.draft_slots[:num_nodes],
            ]
            end = total + entry.run_len + num_nodes
            if scored_from is not None:
                sampled.append(np.arange(total + max(0, scored_from - entry.start), end))
            elif entry.samples:
                sampled.append(np.arange(end - num_nodes - 1, end))
            total = end
            offsets[b + 1] = total
        return QueryRows(
            input_ids=_flat(input_ids, self._minimum_rows),
            positions=_flat(positions, self._minimum_rows),
            slots=_flat(slots, self._minimum_rows),
            offsets=offsets,
            sampled=_flat(sampled, 0),
        )

    def _attention_plan(
        self, batch: Batch, trees: DraftTrees, offsets: np.ndarray
    ) -> AttentionPlan:
        entries = batch.entries
        node_slots = [
            entry.draft_slots[: int(trees.offsets_B1[b + 1] - trees.offsets_B1[b])]
            for b, entry in enumerate(entries)
        ]
        if self._device.type != "cpu":  # on the CPU the tensor is a view of the array
            self._req_to_token_device.copy_(torch.from_numpy(self._req_to_token))
        return AttentionPlan(
            req_to_token=self._req_to_token_device,
            rows_B=self._int32([entry.request.row for entry in entries]),
            starts_B=self._int32([entry.start for entry in entries]),
            run_lens_B=self._int32([entry.run_len for entry in entries]),
            q_offsets_B1=self._tensor(offsets),
            node_offsets_B1=self._tensor(trees.offsets_B1.astype(np.int32)),
            node_masks_N=self._tensor(trees.masks_N.view(np.int64)),
            node_slots_N=self._tensor(_flat(node_slots, 0).astype(np.int32)),
            longest=max((entry.end for entry in entries), default=0),
        )

    def _int32(self, values: list[int]) -> torch.Tensor:
        return self._tensor(np.array(values, dtype=np.int32))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _flat(parts: list[np.ndarray], minimum: int) -> np.ndarray:
    """Concatenate as int64 and pad with zeros (token 0, position 0, the null slot)."""
    flat = np.concatenate(parts) if parts else np.zeros(0)
    return _padded(flat.astype(np.int64), minimum)


def _padded(array: np.ndarray, minimum: int) -> np.ndarray:
    missing = minimum - array.size
    return array if missing <= 0 else np.concatenate([array, np.zeros(missing, dtype=array.dtype)])
