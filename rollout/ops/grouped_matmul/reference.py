"""The grouped matrix product in plain torch: a loop over experts."""

from __future__ import annotations

from itertools import pairwise

import torch

from rollout.ops.grouped_matmul.groups import RowGroups
from rollout.ops.matmul import reference


def grouped_matmul(
    x_MI: torch.Tensor, weights_NOI: torch.Tensor, groups: RowGroups
) -> torch.Tensor:
    num_pairs = len(groups.pairs_S)
    y_SO = x_MI.new_empty(num_pairs, weights_NOI.shape[1])
    offsets = groups.offsets_N1.tolist()
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if start < end:
            pairs = groups.pairs_S[start:end]
            rows_MI = x_MI[pairs // (num_pairs // len(x_MI))]
            y_SO[pairs] = reference.matmul(rows_MI, weights_NOI[expert])
    return y_SO
