"""Attention and recurrent states of whole sequences, without pool, slots or plan of attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from rollout.memory.state_pool import StatePool
from rollout.models.aux_hidden_states import AuxHiddenStateCollector, AuxHiddenStates
from rollout.models.spec import ModelSpec
from rollout.ops.paged_attention import PLAIN, AttentionVariant
from rollout.ops.rotary_store_kv import rotary_store_kv_
from rollout.ops.state_plan import NO_STATE, StatePlan
from rollout.runner.step_states import StepStates


def rotated(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor | None,
    positions_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in tensors of their own; queries are rotated in place. The keys handed in are
    NaN afterwards, so that whoever reads them shows. Latent attention's values are in its keys."""
    keys_TKD = torch.empty_like(k_TKD)
    values_TKD = None if v_TKD is None else torch.empty_like(v_TKD)
    slots_T = torch.arange(len(k_TKD))
    rotary_store_kv_(q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, keys_TKD, values_TKD, slots_T)
    k_TKD.fill_(torch.nan)
    if values_TKD is None:
        values_TKD = keys_TKD[..., cos_sin_PD.shape[1] :]
    return keys_TKD, values_TKD


def attended(
    q_THD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    scale: float | None,
    variant: AttentionVariant,
) -> torch.Tensor:
    """Causal attention of the last T of L rows."""
    rows, keys, group = len(q_THD), len(k_LKD), q_THD.shape[1] // k_LKD.shape[1]
    mask_TL = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    if variant.window is not None:
        mask_TL = mask_TL.triu(keys - rows - variant.window + 1)
    q_HTD, k_KLD, v_KLD = (x.transpose(0, 1) for x in (q_THD, k_LKD, v_LKD))
    if variant.soft_cap is None and variant.sinks_H is None:
        return scaled_dot_product_attention(
            q_HTD, k_KLD, v_KLD, attn_mask=mask_TL, enable_gqa=True, scale=scale
        ).transpose(0, 1)
    k_HLD, v_HLD = (x.repeat_interleave(group, dim=0) for x in (k_KLD, v_KLD))
    scores_HTL = q_HTD @ k_HLD.mT * (q_THD.shape[2] ** -0.5 if scale is None else scale)
    if variant.soft_cap is not None:
        scores_HTL = variant.soft_cap * torch.tanh(scores_HTL / variant.soft_cap)
    scores_HTL = scores_HTL.masked_fill(~mask_TL, -torch.inf)
    if variant.sinks_H is not None:
        sinks_HT1 = variant.sinks_H[:, None, None].expand(-1, rows, 1)
        scores_HTL = torch.cat((scores_HTL, sinks_HT1), dim=-1)
    return (scores_HTL.softmax(-1)[..., :keys] @ v_HLD).transpose(0, 1)


class DenseAttention:
    """Causal attention within each of several sequences laid end to end."""

    def __init__(self, lengths: Sequence[int], scale: float | None = None) -> None:
        """``scale``: of scores; default: that of heads with keys of their own."""
        self.lengths = list(lengths)
        self.scale = scale

    def run(
        self, layer, q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, rows_R=None, variant=PLAIN
    ) -> torch.Tensor:
        assert rows_R is None
        k_TKD, v_TKD = rotated(q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD)
        out = [
            attended(q, k, v, self.scale, variant)
            for q, k, v in zip(*(x.split(self.lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True)
        ]
        return torch.cat(out).contiguous()

    @property
    def positions(self) -> torch.Tensor:
        return torch.cat([torch.arange(length) for length in self.lengths])


class GrowingAttention:
    """Causal attention within one sequence that comes a few rows at a time."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(
        self, layer, q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, rows_R=None, variant=PLAIN
    ) -> torch.Tensor:
        assert rows_R is None
        k_TKD, v_TKD = rotated(q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD)
        if layer in self.kept:
            old_k, old_v = self.kept[layer]
            k_TKD, v_TKD = torch.cat([old_k, k_TKD]), torch.cat([old_v, v_TKD])
        self.kept[layer] = (k_TKD, v_TKD)
        return attended(q_THD, k_TKD, v_TKD, None, variant).contiguous()


class BlockAttention:
    """Attention of a block of rows over stored context and each other, in any order."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def store(self, layer, q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, variant=PLAIN) -> None:
        self.kept[layer] = self._joined(
            layer, rotated(q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD)
        )

    def run(
        self, layer, q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD, rows_R=None, variant=PLAIN
    ) -> torch.Tensor:
        assert rows_R is None
        new = rotated(q_THD, k_TKD, v_TKD, positions_T, cos_sin_PD)
        q_HTD, k_KLD, v_KLD = (x.transpose(0, 1) for x in (q_THD, *self._joined(layer, new)))
        out = scaled_dot_product_attention(q_HTD, k_KLD, v_KLD, enable_gqa=True)
        return out.transpose(0, 1).contiguous()

    def _joined(self, layer, new):
        if layer not in self.kept:
            return new
        return tuple(torch.cat(pair) for pair in zip(self.kept[layer], new, strict=True))


class DenseStates:
    """States of several sequences laid end to end, from scratch or from what a step has kept."""

    def __init__(
        self, spec: ModelSpec, *, num_slots: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        """``num_slots``: to keep states in, numbered from 1."""
        assert spec.linear_attention is not None
        self.pool = StatePool(
            spec.linear_attention, num_slots=num_slots, dtype=dtype, device=torch.device("cpu")
        )

    def begin(
        self,
        lengths: Sequence[int],
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> StepStates:
        """The states of one step: the sequences' lengths, the slots they continue, and those of
        their last states."""
        nowhere = [NO_STATE] * len(lengths)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        parents = torch.arange(sum(lengths)) - 1
        kept = torch.full((sum(lengths),), NO_STATE)
        for first, last, target in zip(offsets[:-1], offsets[1:], targets or nowhere, strict=True):
            if first < last:
                parents[first] = -1
                kept[last - 1] = target
        plan = StatePlan(
            q_offsets_B1=offsets.int(),
            sources_B=torch.tensor(sources or nowhere, dtype=torch.int32),
            parents_T=parents.int(),
            targets_T=kept.int(),
        )
        return StepStates(
            convolutions=self.pool.convolutions, recurrent=self.pool.recurrent, plan=plan
        )


def states_of(model, lengths: Sequence[int]) -> StepStates | None:
    """The states of whole sequences from scratch, if the model has any."""
    if model.spec.linear_attention is None:
        return None
    return DenseStates(model.spec, dtype=model.dtype).begin(lengths)


@torch.inference_mode()
def features_of(model, features: AuxHiddenStates, sequence: Sequence[int]) -> torch.Tensor:
    """The features [length, F] that a draft reads of each token of a sequence."""
    length = len(sequence)
    attention, states = DenseAttention([length]), states_of(model, [length])
    like = torch.empty(0, dtype=model.dtype)
    collector = AuxHiddenStateCollector(features, length, model.spec.hidden_size, like)
    tokens = torch.as_tensor(sequence).long()
    model.forward(tokens, attention.positions, attention, collector, states=states)
    return collector.features_TF


@torch.inference_mode()
def logits_of(model, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [length, V] of every sequence, all run in one ragged forward."""
    lengths = [len(sequence) for sequence in sequences]
    attention = DenseAttention(lengths, model.spec.attention_scale)
    tokens = torch.tensor([token for sequence in sequences for token in sequence]).long()
    states = states_of(model, lengths)
    hidden = model.forward(tokens, attention.positions, attention, states=states)
    return list(model.logits(hidden).split(attention.lengths))
