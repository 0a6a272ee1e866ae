"""Pairs sorted by expert on a GPU: one launch, a program per expert, which looks at all pairs.

It counts those of lower experts, behind which its own begin, then writes its own in order: a sort
takes several launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.ops import gpu
from rollout.ops.grouped_matmul.groups import RowGroups

_BLOCK = 1024


def group_rows(experts_TX: torch.Tensor, num_experts: int) -> RowGroups:
    experts_S = experts_TX.flatten()
    pairs_S = torch.empty_like(experts_S, dtype=torch.int64)
    offsets_N1 = experts_S.new_empty(num_experts + 1, dtype=torch.int32)
    with gpu.on(experts_S.device):
        _group_rows_kernel[(num_experts,)](
            experts_S, pairs_S, offsets_N1, len(experts_S), BLOCK=_BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return RowGroups(pairs_S=pairs_S, offsets_N1=offsets_N1)


@triton.jit(do_not_specialize=["num_pairs"])
def _group_rows_kernel(experts_ptr, pairs_ptr, offsets_ptr, num_pairs, BLOCK: tl.constexpr):
    own = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pair = first + lane
        expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=2**30)
        lower += (expert < own).to(tl.int32)
    begin = tl.sum(lower, axis=0)
    tl.store(offsets_ptr + own, begin)
    for first in range(0, num_pairs, BLOCK):
        pair = first + lane
        expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=2**30)
        is_own = (expert == own).to(tl.int32)
        place = begin + tl.cumsum(is_own, axis=0) - 1
        tl.store(pairs_ptr + place, pair.to(tl.int64), mask=is_own > 0)
        begin += tl.sum(is_own, axis=0)
    if own == tl.num_programs(0) - 1:
        tl.store(offsets_ptr + own + 1, num_pairs)
