"""Draft-extend: what the target computed in a step, as rows a draft can run, and tree roots.

Legend: B entries, T rows, R rows that trees grow from, Q rows of ``req_to_token``, E hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.types import Request, Scheduled
from spec_workers.neural.draft_runner import KnownRuns
from spec_workers.observation import Observation, runs_prompt


@dataclass(kw_only=True, slots=True)
class Extension:
    """Every computed position whose next token is known, and where the sequences go on."""

    runs: KnownRuns  # one for each entry, T rows in all
    query_rows_T: NDArray[np.int64]  # of the target's forward
    entries_R: list[int]  # those that will run their last token next
    last_rows_R: NDArray[np.int64]  # of T: each one's last, behind which comes that token
    ends_R: NDArray[np.int64]  # tokens of their sequences, the emitted ones included

    @staticmethod
    def of(step: Observation, *, prompts_alone: bool = False) -> Extension:
        """Runs of committed tokens, then the accepted nodes: finished requests' too, for what they
        leave in the prefix cache. ``prompts_alone``: of those that run a prompt."""
        following: list[int] = []
        query_rows: list[int] = []
        lens: list[int] = []
        entries, last_rows, ends = [], [], []
        first_rows = step.forwarded.offsets_B1.tolist()
        for b, (entry, result) in enumerate(zip(step.batch.entries, step.results, strict=True)):
            if prompts_alone and not runs_prompt(entry):
                lens.append(0)
                continue
            request, path = entry.request, result.path
            tokens = request.tokens[entry.start + 1 : entry.end + 1] + result.token_ids
            following += tokens
            # Without a token behind it, as where the logits were broken, the root is not run.
            run_len = min(entry.run_len, len(tokens))
            query_rows += range(first_rows[b], first_rows[b] + run_len)
            query_rows += [first_rows[b] + entry.run_len - 1 + node for node in path]
            lens.append(run_len + len(path))
            end = len(request.tokens) + len(result.token_ids)
            if result.finish_reason is None and entry.start + lens[-1] == end - 1:
                entries.append(b)
                last_rows.append(len(query_rows) - 1)
                ends.append(end)
        runs = KnownRuns(
            rows_B=np.array([entry.request.row for entry in step.batch.entries], dtype=np.int64),
            starts_B=np.array([entry.start for entry in step.batch.entries], dtype=np.int64),
            lens_B=np.array(lens, dtype=np.int64),
            next_TK=np.array(following, dtype=np.int32)[:, None],
            tokens_B=[entry.request.tokens for entry in step.batch.entries],
        )
        return Extension(
            runs=runs,
            query_rows_T=np.array(query_rows, dtype=np.int64),
            entries_R=entries,
            last_rows_R=np.array(last_rows, dtype=np.int64),
            ends_R=np.array(ends, dtype=np.int64),
        )


class DraftRoots:
    """The draft's hidden state of each running request at its last known position.

    Kept by row of ``req_to_token``, so there are never more than requests may run. One is told by
    its request and by how long the sequence was: after a step without draft-extend there is none.
    """

    def __init__(self, rows: int, hidden_size: int, like: torch.Tensor) -> None:
        """``like``: a tensor whose dtype and device the hidden states have."""
        self._hidden_QE = like.new_zeros((rows, hidden_size))
        self._requests_Q = np.full(rows, -1, dtype=np.int64)
        self._ends_Q = np.zeros(rows, dtype=np.int64)

    def keep(
        self,
        requests: Sequence[Request],
        ends_R: NDArray[np.int64],
        rows_R: torch.Tensor,
        hidden_RE: torch.Tensor,
    ) -> None:
        """``ends_R``: tokens of each sequence, those included that the scheduler will append;
        ``rows_R``: the requests' rows, where the hidden states are."""
        self._hidden_QE.index_copy_(0, rows_R, hidden_RE)
        rows = [request.row for request in requests]
        self._requests_Q[rows] = [request.request_id for request in requests]
        self._ends_Q[rows] = ends_R

    def has(self, entry: Scheduled) -> bool:
        """Whether the entry runs its last token alone, and the state before it is kept."""
        row, request_id = entry.request.row, entry.request.request_id
        is_its_own = bool(self._requests_Q[row] == request_id)
        return entry.run_len == 1 and is_its_own and bool(self._ends_Q[row] == entry.end)

    def hidden(self, rows_R: torch.Tensor) -> torch.Tensor:
        """[R, E], as a copy; int64 rows, where the hidden states are."""
        return self._hidden_QE[rows_R]

    def forget(self) -> None:
        self._requests_Q[:] = -1

    def forget_request(self, request: Request) -> None:
        self._requests_Q[self._requests_Q == request.request_id] = -1
