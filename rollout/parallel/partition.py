"""Partitions of a dimension among ranks, and gathering the parts.

Legend: T rows of one rank, S rows of all ranks, C columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch

from rollout.parallel.rank_group import RankGroup


def even_parts(total: int, size: int) -> tuple[range, ...]:
    """[0, total) in ``size`` consecutive parts of equal length; the last ones may be shorter."""
    width = -(-total // size)
    return tuple(
        range(min(rank * width, total), min((rank + 1) * width, total)) for rank in range(size)
    )


def consecutive(widths: Iterable[int]) -> tuple[range, ...]:
    """The parts of these widths, one behind the other, the first from 0 on."""
    return tuple(range(*ends) for ends in pairwise(accumulate(widths, initial=0)))


def scaled(parts: Sequence[range], width: int) -> tuple[range, ...]:
    """The parts of a dimension in which each index of ``parts`` stands for ``width`` indices."""
    return tuple(range(part.start * width, part.stop * width) for part in parts)


def gather_rows(group: RankGroup, x_TC: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """The rows of all ranks, [S, C] in rank order, and the slice of this rank's rows.

    T may differ between ranks and may be 0. Takes two exchanges: the counts, then the rows.
    """
    counts = group.all_gather_int(len(x_TC))
    width = x_TC.shape[1]
    parts = consecutive(count * width for count in counts)
    gathered_SC = group.all_gather_columns(x_TC.reshape(1, x_TC.numel()), parts).view(-1, width)
    first = sum(counts[: group.rank])
    return gathered_SC, slice(first, first + len(x_TC))
