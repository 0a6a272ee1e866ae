"""Partitions of a dimension among ranks, and gathering the parts.

Legend: T rows of one rank, S rows of all ranks, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from rollout.parallel.rank_group import RankGroup


def even_parts(total: int, size: int) -> tuple[range, ...]:
    """[0, total) in ``size`` consecutive parts of equal length; the last ones may be shorter."""
    width = -(-total // size)
    return tuple(
        range(min(rank * width, total), min((rank + 1) * width, total)) for rank in range(size)
    )


def scaled(parts: Sequence[range], width: int) -> tuple[range, ...]:
    """The parts of a dimension in which each index of ``parts`` stands for ``width`` indices."""
    return tuple(range(part.start * width, part.stop * width) for part in parts)


def gather_columns(group: RankGroup, x_TC: torch.Tensor, parts: Sequence[range]) -> torch.Tensor:
    """Every rank's columns of the same rows, side by side: [T, all columns].

    ``parts``: the columns of each rank, consecutive, none longer than the first.
    """
    if group.size == 1:
        return x_TC
    width = len(parts[0])
    if x_TC.shape[1] < width:
        x_TC = pad(x_TC, (0, width - x_TC.shape[1]))
    gathered = group.gather(x_TC)
    return torch.cat([each[:, : len(part)] for each, part in zip(gathered, parts, strict=True)], 1)


def gather_rows(group: RankGroup, x_TC: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """The rows of all ranks, [S, C] in rank order, and the slice of this rank's rows.

    T may differ between ranks and may be 0. Takes two exchanges: the counts, then the rows.
    """
    counts = group.numbers(len(x_TC))
    most = max(counts)
    gathered = group.gather(pad(x_TC, (0, 0, 0, most - len(x_TC))))
    first = sum(counts[: group.rank])
    rows = [each[:count] for each, count in zip(gathered, counts, strict=True)]
    return torch.cat(rows), slice(first, first + len(x_TC))
