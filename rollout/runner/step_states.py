"""Recurrent states of a step: planned once, run once per layer.

Legend: B entries, T query rows, N draft nodes, S slots; C channels, W taps, H key heads of K, G
value heads of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops.causal_conv import causal_conv
from rollout.ops.gated_delta_rule import gated_delta_rule
from rollout.ops.gated_delta_rule.chunked import ChunkedPlan
from rollout.ops.state_plan import NO_STATE, StatePlan
from rollout.ops.transfers import A
from rollout.types import Batch, DraftTrees


class StepStates:
    """One step's recurrent states: what the plan fixes once, every recurrent layer runs with."""

    def __init__(
        self,
        *,
        convolutions: Sequence[torch.Tensor],
        recurrent: Sequence[torch.Tensor],
        plan: StatePlan,
        chunks: ChunkedPlan | None = None,
    ) -> None:
        """``convolutions`` [S, C, W - 1] and ``recurrent`` [S, G, K, V], of each layer.

        ``chunks``, made of the plan: its long runs, to be computed in chunks.
        """
        self._convolutions = convolutions
        self._recurrent = recurrent
        self._plan = plan
        self._chunks = chunks

    def convolve(
        self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None
    ) -> torch.Tensor:
        """The short convolution of all rows: [T, C]. See `ops.causal_conv`."""
        return causal_conv(x_TC, weight_CW, bias_C, self._convolutions[layer], self._plan)

    def delta_rule(
        self,
        layer: int,
        q_THK: torch.Tensor,
        k_THK: torch.Tensor,
        v_TGV: torch.Tensor,
        log_decay_TG: torch.Tensor,
        beta_TG: torch.Tensor,
    ) -> torch.Tensor:
        """The gated delta rule of all rows: [T, G, V]. See `ops.gated_delta_rule`."""
        return gated_delta_rule(
            q_THK,
            k_THK,
            v_TGV,
            log_decay_TG,
            beta_TG,
            self._recurrent[layer],
            self._plan,
            self._chunks,
        )


@dataclass(kw_only=True)
class StateInputs(Generic[A]):
    """The int32 fields of a `StatePlan` besides ``q_offsets_B1``. Filled by `state_inputs`."""

    sources_B: A
    parents_T: A
    targets_T: A


def state_inputs(
    batch: Batch, trees: DraftTrees, q_offsets_B1: NDArray[np.int32], rows: int
) -> StateInputs[NDArray[np.int32]]:
    """Lay out the states of a step, each of whose entries has some. ``q_offsets_B1`` and ``rows``
    may count padding in."""
    entries, states = batch.entries, []
    for entry in entries:
        assert entry.states is not None, "scheduled without states"
        states.append(entry.states)
    firsts_B = q_offsets_B1[: len(entries)]
    roots_B = firsts_B + np.array([entry.run_len for entry in entries], dtype=np.int32) - 1
    counts_B = np.diff(trees.offsets_B1)
    roots_N = np.repeat(roots_B, counts_B)
    nodes_N = roots_N + 1 + np.arange(len(roots_N)) - np.repeat(trees.offsets_B1[:-1], counts_B)

    parents_T = np.arange(-1, rows - 1, dtype=np.int32)
    parents_T[firsts_B] = -1
    parents_T[nodes_N] = roots_N + trees.parents_N
    parents_T[q_offsets_B1[-1] :] = -1

    targets_T = np.full(rows, NO_STATE, dtype=np.int32)
    for entry, own, first in zip(entries, states, firsts_B.tolist(), strict=True):
        for length, slot in own.checkpoints.items():
            targets_T[first + length - entry.start - 1] = slot
    targets_T[roots_B] = [own.run_end for own in states]
    node_slots = [own.nodes[:count] for own, count in zip(states, counts_B.tolist(), strict=True)]
    targets_T[nodes_N] = np.concatenate([np.empty(0, dtype=np.int32), *node_slots])

    sources_B = np.full(len(q_offsets_B1) - 1, NO_STATE, dtype=np.int32)
    sources_B[: len(entries)] = [own.source for own in states]
    return StateInputs(sources_B=sources_B, parents_T=parents_T, targets_T=targets_T)


def state_plan(q_offsets_B1: torch.Tensor, states: StateInputs[torch.Tensor]) -> StatePlan:
    """The plan of a step's states."""
    return StatePlan(q_offsets_B1=q_offsets_B1, **vars(states))
