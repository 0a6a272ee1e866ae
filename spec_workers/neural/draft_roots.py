"""The hidden states that the next trees grow from.

Legend: R requests, Q rows of ``req_to_token``, E the draft's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.types import Request, Scheduled


class DraftRoots:
    """Of each running request, the draft's hidden state at its last known position.

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
