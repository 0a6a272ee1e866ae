"""What a drafter must offer to be replayed.

Shape legend: B sequences of a call, N tokens or draft nodes of a call, flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

SOURCES = ("group", "live", "external", "gap")
"""Names of the codes in `Drafts.sources_N`, in order."""


@dataclass(kw_only=True, slots=True)
class Drafts:
    """Draft trees of a batch, flat, without the roots.

    Entry b owns nodes ``[offsets_B1[b], offsets_B1[b + 1])``. Within an entry the root (the last
    committed token) is tree node 0 and node j, from 0, is tree node j + 1; parents come before
    children.
    """

    offsets_B1: NDArray[np.int64]
    tokens_N: NDArray[np.int32]
    parents_N: NDArray[np.int32]
    probabilities_N: NDArray[np.float32] | None = None  # that the node is accepted; if estimated
    sources_N: NDArray[np.uint8] | None = None  # index into SOURCES; if the drafter can tell


class Drafter(Protocol):
    """Anything that drafts for many sequences at once. The replay calls it in this order:

    For each step of training `set_weight_version`; then, until the step's sequences are done,
    `open` for those that begin, `propose` and `insert` for all that are open, `close` for those
    that ended.
    """

    name: str

    def set_weight_version(self, version: int) -> None:
        """Tokens from now on come from another policy."""

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        """A sequence begins after ``prompt``; the samples of one prompt share ``group``."""

    def propose(self, sequence_ids_B: NDArray[np.int64], budget: int) -> Drafts:
        """A tree of at most ``budget`` nodes for each of the open sequences."""

    def insert(
        self,
        sequence_ids_B: NDArray[np.int64],
        tokens_N: NDArray[np.int32],
        offsets_B1: NDArray[np.int64],
    ) -> None:
        """Sequence b went on with ``tokens_N[offsets_B1[b]:offsets_B1[b + 1]]``, at least one."""

    def close(self, sequence_id: int) -> None:
        """The sequence ended."""
