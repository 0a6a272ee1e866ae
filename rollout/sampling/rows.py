"""The rows of one step that are sampled from: each entry's root, then its draft nodes.

Legend: B entries, O owners of rows, R rows, N draft nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rollout.ops.ragged import offsets_of, ranges
from rollout.types import Batch, DraftTrees, Request

Paths = list[list[int]]


@dataclass(kw_only=True)
class SampleRows:
    """Row r samples the token at ``positions_R[r]`` of ``requests[r]``.

    Rows come in runs: owner o has ``counts_O[o]`` of them.
    """

    owners: list[Request]
    counts_O: NDArray[np.int64]
    positions_R: NDArray[np.int64]
    find_paths: Callable[[], Paths]  # computes `drafted` when it is first read

    @cached_property
    def requests(self) -> list[Request]:
        """The request of each row."""
        found: list[Request] = []
        for owner, count in zip(self.owners, self.counts_O.tolist(), strict=True):
            found += [owner] * count
        return found

    @cached_property
    def drafted(self) -> Paths:
        """The draft tokens on each row's own path, between the committed tokens and its position:
        penalties must see them."""
        return self.find_paths()

    @property
    def seeds_R(self) -> NDArray[np.uint64]:
        """The request seed of each row."""
        seeds_O = np.array([request.seed for request in self.owners], dtype=np.uint64)
        return self.per_row(seeds_O)

    def per_row(self, values_O: NDArray) -> NDArray:
        """The owner's value of each row: [O] to [R]."""
        return np.repeat(values_O, self.counts_O)


def sample_rows(batch: Batch, trees: DraftTrees) -> tuple[SampleRows, NDArray[np.int64]]:
    """Lay out the rows of a step. Returns them and int64 offsets [B + 1] by entry."""
    sampling = [entry for entry in batch.entries if entry.samples]
    samples_B = np.array([entry.samples for entry in batch.entries], dtype=bool)
    positions_R = np.array([entry.end for entry in sampling], dtype=np.int64)
    if trees.num_nodes:
        rows_B = np.where(samples_B, np.diff(trees.offsets_B1) + 1, 0)
        offsets_B1 = offsets_of(rows_B)
        counts_O = rows_B[samples_B]
        positions_R = np.repeat(positions_R, counts_O)
        positions_R[ranges(offsets_B1[:-1][samples_B] + 1, counts_O - 1)] += trees.depths_N
    else:  # numpy's functions are slow where a forward has emptied the caches
        offsets_B1 = offsets_of(samples_B)
        counts_O = np.ones(len(sampling), dtype=np.int64)
    rows = SampleRows(
        owners=[entry.request for entry in sampling],
        counts_O=counts_O,
        positions_R=positions_R,
        find_paths=lambda: _paths(trees, samples_B),
    )
    return rows, offsets_B1


def rows_of_continuation(request: Request, output_ids: list[int], part: range) -> SampleRows:
    """Rows that would sample ``output_ids[k]``, k in ``part``, after the request's tokens."""
    return SampleRows(
        owners=[request],
        counts_O=np.array([len(part)]),
        positions_R=len(request.tokens) + np.array(part, dtype=np.int64),
        find_paths=lambda: [output_ids[:k] for k in part],
    )


def _paths(trees: DraftTrees, samples_B: NDArray[np.bool_]) -> Paths:
    """The path of each root, which is empty, and of each node."""
    if not trees.num_nodes:
        return [[] for _ in range(np.count_nonzero(samples_B))]
    found: Paths = []
    tokens, parents = trees.tokens_N.tolist(), trees.parents_N.tolist()
    ends = trees.offsets_B1.tolist()
    for b in np.flatnonzero(samples_B).tolist():
        paths: Paths = [[]]
        for node in range(ends[b], ends[b + 1]):
            paths.append([*paths[parents[node]], tokens[node]])
        found += paths
    return found
