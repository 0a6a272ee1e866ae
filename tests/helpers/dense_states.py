"""Recurrent states for tests: a few slots of every layer, and the plan of one step over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.models.spec import ModelSpec
from rollout.ops.causal_conv import causal_conv
from rollout.ops.gated_delta_rule import gated_delta_rule
from rollout.ops.state_plan import NO_STATE, StatePlan


class DenseStates:
    """States of several sequences laid end to end, from scratch or from what a step has kept."""

    def __init__(self, spec: ModelSpec, *, num_slots: int = 0, dtype=torch.float32) -> None:
        """``num_slots``: to keep states in, numbered from 1."""
        linear = spec.linear_attention
        assert linear is not None
        layers, slots = len(linear.layers), num_slots + 1
        conv = (layers, slots, linear.channels, linear.conv_width - 1)
        recurrent = (layers, slots, linear.num_value_heads, linear.key_dim, linear.value_dim)
        self.conv = torch.zeros(conv, dtype=dtype)
        self.recurrent = torch.zeros(recurrent)
        self.plan: StatePlan | None = None

    def begin(
        self,
        lengths: Sequence[int],
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> DenseStates:
        """Of one step: per sequence its rows, where it begins, and where its last state goes."""
        nowhere = [NO_STATE] * len(lengths)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        parents = torch.arange(sum(lengths)) - 1
        kept = torch.zeros(sum(lengths), dtype=torch.int32)
        for first, last, target in zip(offsets[:-1], offsets[1:], targets or nowhere, strict=True):
            if first < last:
                parents[first] = -1
                kept[last - 1] = target
        self.plan = StatePlan(
            q_offsets_B1=offsets.int(),
            sources_B=torch.tensor(sources or nowhere, dtype=torch.int32),
            parents_T=parents.int(),
            targets_T=kept,
        )
        return self

    def convolve(self, layer, x_TC, weight_CW, bias_C) -> torch.Tensor:
        return causal_conv(x_TC, weight_CW, bias_C, self.conv[layer], self.plan)

    def delta_rule(self, layer, q_THK, k_THK, v_TGV, log_decay_TG, beta_TG) -> torch.Tensor:
        states = self.recurrent[layer]
        return gated_delta_rule(q_THK, k_THK, v_TGV, log_decay_TG, beta_TG, states, self.plan)
