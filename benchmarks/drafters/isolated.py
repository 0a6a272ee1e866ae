"""A drafter cut into parts that know nothing of each other: what is lost is what a scope gave."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from drafters.drafter import Drafter, Drafts


class Sees(Enum):
    """What a sequence's drafts may be copied from."""

    OWN = "own context alone"
    SIBLINGS = "siblings of the step"
    GROUP = "group, all steps"
    ALL_UNGROUPED = "all, groups unknown"


class IsolatedDrafter:
    """A drafter of its own for each sequence, each group of a step, or each group; or one for all
    that takes each sequence for a group of its own."""

    def __init__(self, make: Callable[[], Drafter], sees: Sees) -> None:
        self._make = make
        self._sees = sees
        self._parts: dict[int, Drafter] = {}
        self._part_of: dict[int, int] = {}  # by open sequence
        self._version = 0
        self.name = f"{make().name}, {sees.value}"

    def set_weight_version(self, version: int) -> None:
        self._version = version
        if self._sees in (Sees.OWN, Sees.SIBLINGS):
            self._parts.clear()
        for part in self._parts.values():
            part.set_weight_version(version)

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        if self._sees is Sees.ALL_UNGROUPED:
            key, group = 0, sequence_id
        else:
            key = sequence_id if self._sees is Sees.OWN else group
        if key not in self._parts:
            self._parts[key] = self._make()
            self._parts[key].set_weight_version(self._version)
        self._parts[key].open(sequence_id, group, prompt)
        self._part_of[sequence_id] = key

    def propose(self, sequence_ids_B: NDArray[np.int64], budget: int) -> Drafts:
        drafts_B = [
            self._parts[self._part_of[sequence_id]].propose(sequence_ids_B[b : b + 1], budget)
            for b, sequence_id in enumerate(sequence_ids_B.tolist())
        ]
        return Drafts(
            offsets_B1=np.cumsum([0] + [len(drafts.tokens_N) for drafts in drafts_B]),
            tokens_N=np.concatenate([drafts.tokens_N for drafts in drafts_B]),
            parents_N=np.concatenate([drafts.parents_N for drafts in drafts_B]),
        )

    def insert(
        self,
        sequence_ids_B: NDArray[np.int64],
        tokens_N: NDArray[np.int32],
        offsets_B1: NDArray[np.int64],
    ) -> None:
        for b, sequence_id in enumerate(sequence_ids_B.tolist()):
            begin, end = offsets_B1[b : b + 2]
            self._parts[self._part_of[sequence_id]].insert(
                sequence_ids_B[b : b + 1], tokens_N[begin:end], np.array([0, end - begin])
            )

    def close(self, sequence_id: int) -> None:
        key = self._part_of.pop(sequence_id)
        self._parts[key].close(sequence_id)
        if self._sees is Sees.OWN:
            del self._parts[key]
