"""Sorts the pairs of rows and experts by expert.

Legend: T rows, X experts per row, S = T * X pairs, N experts.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.group_rows import reference
from rollout.ops.grouped_matmul.groups import RowGroups

_MAX_SCANNED = 1 << 14
"""Pairs up to which a GPU lets every expert look at all of them; it sorts more."""


def group_rows(experts_TX: torch.Tensor, num_experts: int) -> RowGroups:
    """The pairs of ``experts_TX``, int32 in [0, N), by expert and then by pair. Does not wait for
    the device."""
    if experts_TX.numel() <= _MAX_SCANNED and gpu.runs_on(experts_TX.device):
        from rollout.ops.group_rows import triton

        return triton.group_rows(experts_TX, num_experts)
    return reference.group_rows(experts_TX, num_experts)
