"""CorpusDelta: what one engine's corpus tells another's, the tokens committed since it was last
asked."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rollout.errors import InvalidInputError

_DTYPES = {
    "groups_C": np.uint64,
    "context_offsets_C1": np.int64,
    "context_tokens_M": np.int32,
    "rollouts_B": np.int64,
    "contexts_B": np.int32,
    "starts_B": np.int32,
    "versions_B": np.int64,
    "ends_B": np.bool_,
    "offsets_B1": np.int64,
    "tokens_N": np.int32,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CorpusDelta:
    """Pieces of rollouts, in the order they were committed; flat arrays.

    The pieces of one rollout follow each other without gaps, in this delta and over the later ones
    of the same sender, so the receiver joins them into one document. Siblings whose rollouts begin
    in one delta share their prompt.

    Legend: C contexts that rollouts begin with, M their tokens, B pieces, N their tokens.
    """

    sender: int  # a random number in [0, 2**63): one engine, from when it began to share
    number: int  # counts the sender's deltas from 0
    groups_C: NDArray[np.uint64]  # prompt groups
    context_offsets_C1: NDArray[np.int64]
    context_tokens_M: NDArray[np.int32]  # a prompt, and what was generated before a resubmission
    rollouts_B: NDArray[np.int64]  # the sender's request ids
    contexts_B: NDArray[np.int32]  # the context, of a rollout's first piece; -1 of later ones
    starts_B: NDArray[np.int32]  # tokens the rollout had emitted before this piece
    versions_B: NDArray[np.int64]  # of the weights that sampled the piece
    ends_B: NDArray[np.bool_]  # nothing more will come of the rollout
    offsets_B1: NDArray[np.int64]
    tokens_N: NDArray[np.int32]

    def __post_init__(self) -> None:
        """Raises InvalidInputError, naming the array, for what no `share_corpus` would make."""

        def require(name: str, ok: bool, remedy: str) -> None:
            if not ok:
                shown = getattr(self, name)
                if isinstance(shown, np.ndarray):
                    shown = f"{shown.dtype} {list(shown.shape)}"
                raise InvalidInputError(f"delta.{name}", shown, remedy)

        for name in ("sender", "number"):
            value = getattr(self, name)
            ok = type(value) is int and 0 <= value < 2**63
            require(name, ok, "must be an integer in [0, 2**63)")
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            ok = isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype
            require(name, ok, f"must be a one-dimensional array of {np.dtype(dtype).name}")
        for name in ("contexts_B", "starts_B", "versions_B", "ends_B"):
            same = getattr(self, name).size == self.rollouts_B.size
            require(name, same, f"must have an entry per piece: {self.rollouts_B.size}")
        for offsets, count, flat in (
            ("context_offsets_C1", self.groups_C.size, self.context_tokens_M.size),
            ("offsets_B1", self.rollouts_B.size, self.tokens_N.size),
        ):
            values = getattr(self, offsets)
            ok = values.size == count + 1 and values[0] == 0 and values[-1] == flat
            ok = ok and bool((np.diff(values) >= 0).all())
            require(offsets, ok, f"must rise from 0 to {flat} in {count} steps")
        in_range = (self.contexts_B >= -1) & (self.contexts_B < self.groups_C.size)
        require("contexts_B", bool(in_range.all()), f"must be in [-1, {self.groups_C.size})")
        begins = self.contexts_B >= 0
        require("starts_B", bool(((self.starts_B == 0) | (~begins & (self.starts_B > 0))).all()),
                "must be 0 of a rollout's first piece, and >= 0 of others")  # fmt: skip
        for name in ("context_tokens_M", "tokens_N"):
            require(name, bool((getattr(self, name) >= 0).all()), "token ids must be >= 0")

    @property
    def num_tokens(self) -> int:
        """Emitted ones; those of contexts are not counted."""
        return self.tokens_N.size

    @property
    def num_bytes(self) -> int:
        return sum(
            value.nbytes
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), np.ndarray)
        )
