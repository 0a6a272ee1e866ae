"""The hidden states that a chain's steps go on from.

Legend: B requests, Q rows of ``req_to_token``, K steps of the chain, E hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.types import Request


class ChainState:
    """Of each running request and each step, the last known row: its position and hidden state.

    Step k knows one position less than step k - 1: its row there waits for one token more. When
    that comes it takes the hidden state kept here, and until then the trees grow from it. Kept by
    row of ``req_to_token``, so there are never more than requests may run.
    """

    def __init__(self, rows: int, num_steps: int, hidden_size: int, like: torch.Tensor) -> None:
        """``like``: a tensor whose dtype and device the hidden states have."""
        self._hidden_KQE = like.new_zeros((num_steps, rows, hidden_size))
        self._last_QK = np.full((rows, num_steps), -1, dtype=np.int64)
        self._requests_Q = np.full(rows, -1, dtype=np.int64)

    def last(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        """[B, K]: the position of each last row, -1 where there is none."""
        rows_B, ids_B = _rows_and_ids(requests)
        return np.where((self._requests_Q[rows_B] == ids_B)[:, None], self._last_QK[rows_B], -1)

    def hidden(self, step: int, rows_B: torch.Tensor) -> torch.Tensor:
        """[B, E], as a copy; of rows without a last position it means nothing. int64 rows, where
        the hidden states are."""
        return self._hidden_KQE[step, rows_B]

    def begin(self, requests: Sequence[Request]) -> None:
        """Rows that are these requests' from now on; what others left there is forgotten."""
        rows_B, ids_B = _rows_and_ids(requests)
        self._last_QK[rows_B[self._requests_Q[rows_B] != ids_B]] = -1
        self._requests_Q[rows_B] = ids_B

    def keep(
        self,
        step: int,
        rows_B: NDArray[np.int64],
        positions_B: NDArray[np.int64],
        at_B: torch.Tensor,
        hidden_BE: torch.Tensor,
    ) -> None:
        """``at_B``: the rows, where the hidden states are."""
        self._last_QK[rows_B, step] = positions_B
        self._hidden_KQE[step].index_copy_(0, at_B, hidden_BE)

    def forget(self) -> None:
        self._requests_Q[:] = -1

    def forget_request(self, request: Request) -> None:
        self._requests_Q[self._requests_Q == request.request_id] = -1


def _rows_and_ids(requests: Sequence[Request]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (
        np.array([request.row for request in requests], dtype=np.int64),
        np.array([request.request_id for request in requests], dtype=np.int64),
    )
