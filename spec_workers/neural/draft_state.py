"""The hidden states that a chain's runners go on from.

Legend: B requests, Q rows of ``req_to_token``, K runners of the chain, E hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.types import Request


class DraftState:
    """The last known position of each running request and runner, and its hidden state.

    Runner k knows one position less than runner k - 1: its row there waits for one token more. When
    that comes it takes the hidden state that is stored here, and until then trees grow from it.
    Stored by row of ``req_to_token``, so there are never more than requests may run.
    """

    def __init__(self, rows: int, num_runners: int, hidden_size: int, like: torch.Tensor) -> None:
        """``like``: a tensor whose dtype and device the hidden states have."""
        self._hidden_KQE = like.new_zeros((num_runners, rows, hidden_size))
        self._last_QK = np.full((rows, num_runners), -1, dtype=np.int64)
        self._requests_Q = np.full(rows, -1, dtype=np.int64)

    def last(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        rows_B, ids_B = _rows_and_ids(requests)
        return np.where((self._requests_Q[rows_B] == ids_B)[:, None], self._last_QK[rows_B], -1)

    def hidden(self, runner: int, rows_B: torch.Tensor) -> torch.Tensor:
        """A copy [B, E] of a runner's hidden states; undefined for rows without a last position.
        ``rows_B``: int64, on the device of the hidden states."""
        return self._hidden_KQE[runner, rows_B]

    def begin(self, requests: Sequence[Request]) -> None:
        """Give the rows to these requests, and forget what other requests left there."""
        rows_B, ids_B = _rows_and_ids(requests)
        self._last_QK[rows_B[self._requests_Q[rows_B] != ids_B]] = -1
        self._requests_Q[rows_B] = ids_B

    def store(
        self,
        runner: int,
        rows_B: NDArray[np.int64],
        positions_B: NDArray[np.int64],
        device_rows_B: torch.Tensor,
        hidden_BE: torch.Tensor,
    ) -> None:
        """``device_rows_B``: the rows, where the hidden states are."""
        self._last_QK[rows_B, runner] = positions_B
        self._hidden_KQE[runner].index_copy_(0, device_rows_B, hidden_BE)

    def forget(self) -> None:
        """Forget all hidden states, which were computed with other weights."""
        self._requests_Q[:] = -1

    def forget_request(self, request: Request) -> None:
        self._requests_Q[self._requests_Q == request.request_id] = -1


def _rows_and_ids(requests: Sequence[Request]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (
        np.array([request.row for request in requests], dtype=np.int64),
        np.array([request.request_id for request in requests], dtype=np.int64),
    )
