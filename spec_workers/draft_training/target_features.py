"""The target's hidden states of recorded tokens, computed once and cached.

Legend: T query rows, L tokens, N = L - 1 rows of features, F feature columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.memory.kv_pool import KvPool
from rollout.memory.state_pool import StatePool
from rollout.models.aux_hidden_states import AuxHiddenStateCollector, AuxHiddenStates
from rollout.models.causal_lm import CausalLM
from rollout.models.forward_context import StepAttention
from rollout.ops.paged_attention import AttentionPlan
from rollout.ops.state_plan import NO_STATE, StatePlan
from rollout.runner.step_states import StepStates
from spec_workers.draft_training.sequences import TokenSequence, TrainingSequence

_ROWS_AT_ONCE = 1024


class TargetFeatures:
    """Features of a list of sequences, on the target's device.

    The first ones that are taken are cached in the target's dtype, up to ``max_bytes``; the others
    are computed each time.
    """

    def __init__(
        self,
        model: CausalLM,
        features: AuxHiddenStates,
        sequences: Sequence[TokenSequence],
        max_bytes: int,
    ) -> None:
        self._model = model
        self._features = features
        self._sequences = sequences
        self._room = max_bytes
        self._cached: dict[int, TrainingSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def num_rows(self, index: int) -> int:
        """Rows of features of a sequence."""
        return len(self._sequences[index].token_ids_L) - 1

    def num_guesses(self, index: int) -> int:
        """Rows of a sequence that guess in training."""
        return self.num_rows(index) - 1 - self._sequences[index].first_root

    def take(self, indices: Sequence[int]) -> list[TrainingSequence]:
        """The sequences of these indices with their features."""
        missing = [index for index in indices if index not in self._cached]
        found: dict[int, TrainingSequence] = {}
        for group in self._grouped(missing):
            for index, sequence in zip(group, self._compute(group), strict=True):
                found[index] = sequence
                num_bytes = sequence.features_NF.nbytes
                if num_bytes <= self._room:
                    self._room -= num_bytes
                    self._cached[index] = sequence
        return [self._cached[index] if index in self._cached else found[index] for index in indices]

    def _grouped(self, indices: list[int]) -> list[list[int]]:
        """Groups of at most `_ROWS_AT_ONCE` rows, or of one longer sequence."""
        groups: list[list[int]] = []
        rows = _ROWS_AT_ONCE
        for index in indices:
            if rows + self.num_rows(index) > _ROWS_AT_ONCE:
                groups.append([])
                rows = 0
            groups[-1].append(index)
            rows += self.num_rows(index)
        return groups

    @torch.inference_mode()
    def _compute(self, group: list[int]) -> list[TrainingSequence]:
        lengths = [self.num_rows(index) for index in group]
        device, hidden = self._model.device, self._model.spec.hidden_size
        ids_T = torch.cat([self._sequences[index].token_ids_L[:-1] for index in group])
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        like = torch.empty(0, dtype=self._model.dtype, device=device)
        collector = AuxHiddenStateCollector(self._features, len(ids_T), hidden, like)
        self._model.forward(
            ids_T.to(device),
            positions_T.to(device),
            _causal_attention(self._model, lengths),
            collector,
            states=_states(self._model, lengths),
        )
        parts = collector.features_TF.split(lengths)
        if len(parts) > 1:  # so that a cached part does not hold the memory of others
            parts = tuple(part.clone() for part in parts)
        return [
            TrainingSequence(tokens=self._sequences[index], features_NF=part)
            for index, part in zip(group, parts, strict=True)
        ]


def _causal_attention(model: CausalLM, lengths: list[int]) -> StepAttention:
    """Attention of whole sequences. All layers write to the same pool, one after another."""
    spec, rows = model.spec, sum(lengths)
    pool = KvPool(
        num_layers=1,
        num_slots=rows,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        has_values=spec.latent is None,
        dtype=model.dtype,
        device=model.device,
    )
    return StepAttention(
        keys=pool.keys * len(spec.attention_layers),
        values=pool.values * len(spec.attention_layers),
        slots_T=torch.arange(rows, device=model.device),
        plan=_causal_plan(lengths, model.device),
        scale=spec.attention_scale,
    )


def _causal_plan(lengths: list[int], device: torch.device) -> AttentionPlan:
    """The plan of whole sequences, whose keys are in the slots of their rows."""
    offsets_B1 = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int32, device=device)
    slots = offsets_B1[:-1, None] + torch.arange(max(lengths), dtype=torch.int32)
    return AttentionPlan(
        req_to_token=slots.to(device),
        rows_B=torch.arange(len(lengths), dtype=torch.int32, device=device),
        q_offsets_B1=offsets_B1.to(device),
        starts_B=torch.zeros(len(lengths), dtype=torch.int32, device=device),
        run_lens_B=offsets_B1.diff().to(device),
        node_offsets_B1=torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device),
        node_masks_N=none.long(),
        node_slots_N=none,
    )


def _states(model: CausalLM, lengths: list[int]) -> StepStates | None:
    """Recurrent states of a forward whose sequences begin without one and store none."""
    spec = model.spec.linear_attention
    if spec is None:
        return None
    pool = StatePool(spec, num_slots=0, dtype=model.dtype, device=model.device)
    offsets_B1 = torch.tensor([0, *lengths]).cumsum(0)
    parents_T = torch.arange(sum(lengths)) - 1
    parents_T[offsets_B1[:-1]] = -1
    plan = StatePlan(
        q_offsets_B1=offsets_B1.int().to(model.device),
        sources_B=torch.full_like(offsets_B1[1:], NO_STATE).int().to(model.device),
        parents_T=parents_T.int().to(model.device),
        targets_T=torch.full_like(parents_T, NO_STATE).int().to(model.device),
    )
    return StepStates(
        convolutions=pool.convolutions,
        recurrent=pool.recurrent,
        plan=plan,
    )
