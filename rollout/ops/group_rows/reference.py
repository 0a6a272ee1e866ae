"""Pairs sorted by expert in plain torch."""

from __future__ import annotations

import torch

from rollout.ops.grouped_matmul.groups import RowGroups


def group_rows(experts_TX: torch.Tensor, num_experts: int) -> RowGroups:
    sorted_S, pairs_S = experts_TX.flatten().sort(stable=True)
    bounds_N1 = torch.arange(num_experts + 1, dtype=sorted_S.dtype, device=sorted_S.device)
    offsets_N1 = torch.searchsorted(sorted_S, bounds_N1, out_int32=True)
    return RowGroups(pairs_S=pairs_S, offsets_N1=offsets_N1)
