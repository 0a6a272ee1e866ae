"""Attention over whole sequences with torch's own kernel: no pool, no slots, no plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.helpers.dense_states import DenseStates


class DenseAttention:
    """Causal attention within each of several sequences laid end to end."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def run(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        out = [
            scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
                is_causal=True, enable_gqa=True,
            ).transpose(0, 1)
            for q, k, v in zip(*(x.split(self.lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True)
        ]  # fmt: skip
        return torch.cat(out).contiguous()

    @property
    def positions(self) -> torch.Tensor:
        return torch.cat([torch.arange(length) for length in self.lengths])


@torch.inference_mode()
def logits_of(model, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [length, V] of every sequence, all run in one ragged forward."""
    attention = DenseAttention([len(sequence) for sequence in sequences])
    tokens = torch.tensor([token for sequence in sequences for token in sequence]).long()
    states = None
    if model.spec.linear_attention is not None:
        states = DenseStates(model.spec, dtype=model.dtype).begin(attention.lengths)
    hidden = model.forward(tokens, attention.positions, attention, states=states)
    return list(model.logits(hidden).split(attention.lengths))
