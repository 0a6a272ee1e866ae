"""A bounded ring of sequences with the hidden states that the target computed for them.

Legend: L tokens of a sequence, N rows of features, F feature columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SHARE = 8
"""A sequence takes at most one byte in so many, so that a ring holds several sequences."""

_TOKEN_BYTES = torch.int64.itemsize
_MIN_TOKENS = 128  # of a sequence that the smallest ring has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSequence:
    """A request's tokens from the first on, and features at consecutive positions.

    Positions found in the prefix cache have no features: ``first_position`` is then larger than 0.
    All of ``features_NF`` were computed by one weight version.
    """

    token_ids_L: torch.Tensor  # int64, L >= first_position + N
    prompt_len: int
    first_position: int
    features_NF: torch.Tensor  # in the ring's dtype and layout
    weight_version: int
    number: int  # sequences written before it

    @property
    def num_bytes(self) -> int:
        """Bytes of tokens and features."""
        return self.token_ids_L.nbytes + self.features_NF.nbytes


class FeatureRing:
    """The newest sequences; the oldest make room for new ones.

    Args:
        capacity: bound on the bytes of tokens and features.
        features: the states in each row, ``hidden_size`` columns each.
        dtype: the dtype of the rows.
        field: the name of ``capacity`` in errors.

    Raises InvalidInputError for a capacity that holds no sequence.
    """

    def __init__(
        self,
        capacity: int,
        features: AuxHiddenStates,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        field: str = "capacity",
    ) -> None:
        self.capacity = capacity
        self.features = features
        self.dtype = dtype
        self.num_columns = features.count * hidden_size
        self.row_bytes = self.num_columns * dtype.itemsize
        least = MAX_SHARE * (2 * self.row_bytes + _MIN_TOKENS * _TOKEN_BYTES)
        if capacity < least:
            raise InvalidInputError(
                field, capacity, f"must be >= {least} for rows of {self.row_bytes} bytes"
            )
        self.num_written = 0
        self.times_read = 0
        self._sequences: deque[FeatureSequence] = deque()
        self._num_bytes = 0

    def max_rows(self, num_tokens: int) -> int:
        """The most rows that a sequence of ``num_tokens`` tokens may have."""
        return (self.capacity // MAX_SHARE - _TOKEN_BYTES * num_tokens) // self.row_bytes

    def write(
        self,
        token_ids: Sequence[int],
        rows: Sequence[torch.Tensor],
        *,
        first_position: int,
        prompt_len: int,
        weight_version: int,
    ) -> None:
        """Add a sequence; the oldest ones make room.

        Args:
            rows: blocks of features [n, F] at consecutive positions, on the CPU; at most `max_rows`
                in all. They are copied.
            first_position: position of the first row.
        """
        sequence = FeatureSequence(
            token_ids_L=torch.tensor(token_ids, dtype=torch.int64),
            prompt_len=prompt_len,
            first_position=first_position,
            features_NF=torch.cat([each.to(self.dtype) for each in rows]),
            weight_version=weight_version,
            number=self.num_written,
        )
        num_rows = len(sequence.features_NF)
        assert num_rows <= self.max_rows(len(token_ids)), "the sequence is too long for the ring"
        assert first_position + num_rows <= len(token_ids)
        self.num_written += 1
        self._sequences.append(sequence)
        self._num_bytes += sequence.num_bytes
        while self._num_bytes > self.capacity:
            self._num_bytes -= self._sequences.popleft().num_bytes

    def read(self, first: int) -> list[FeatureSequence]:
        """The sequences with this number and later ones, oldest first, as far as they are held."""
        self.times_read += 1
        return [each for each in self._sequences if each.number >= first]
