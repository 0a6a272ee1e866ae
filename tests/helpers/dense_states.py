"""Recurrent states for tests: a few slots, and the plan of one step over whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.memory.state_pool import StatePool
from rollout.models.spec import ModelSpec
from rollout.ops.state_plan import NO_STATE, StatePlan
from rollout.runner.step_states import StepStates


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
