"""The rows of one step that are sampled from: each entry's root, then its draft nodes.

Legend: B entries, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.types import Batch, DraftTrees, Request


@dataclass(kw_only=True, slots=True)
class SampleRows:
    """Row r samples the token at ``positions_R[r]`` of ``requests[r]``.

    ``drafted[r]`` are the draft tokens between the committed ones and that position: the row's own
    path, which is what penalties, minimum length and stops must see.
    """

    requests: list[Request]
    positions_R: np.ndarray  # int64
    drafted: list[list[int]]

    @property
    def seeds_R(self) -> np.ndarray:
        return np.array([request.seed for request in self.requests], dtype=np.uint64)

    def generated_len(self, row: int) -> int:
        """Tokens that count against min/max_new_tokens before this row's token."""
        return self.requests[row].generated_len + len(self.drafted[row])


def sample_rows(batch: Batch, trees: DraftTrees) -> tuple[SampleRows, np.ndarray]:
    """Lay out the rows of a step. Returns them and int64 offsets [B + 1] by entry."""
    requests: list[Request] = []
    positions: list[int] = []
    drafted: list[list[int]] = []
    offsets_B1 = np.zeros(len(batch.entries) + 1, dtype=np.int64)
    tokens, parents = trees.tokens_N.tolist(), trees.parents_N.tolist()
    for b, entry in enumerate(batch.entries):
        if entry.samples:
            paths: list[list[int]] = [[]]
            for node in range(int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1])):
                paths.append([*paths[parents[node]], tokens[node]])
            requests.extend([entry.request] * len(paths))
            positions.extend(entry.end + len(path) for path in paths)
            drafted.extend(paths)
        offsets_B1[b + 1] = len(requests)
    rows = SampleRows(
        requests=requests, positions_R=np.array(positions, dtype=np.int64), drafted=drafted
    )
    return rows, offsets_B1


def rows_of_continuation(request: Request, output_ids: list[int], part: range) -> SampleRows:
    """Rows that would sample ``output_ids[k]``, k in ``part``, after the request's tokens."""
    return SampleRows(
        requests=[request] * len(part),
        positions_R=len(request.tokens) + np.array(part, dtype=np.int64),
        drafted=[output_ids[:k] for k in part],
    )
