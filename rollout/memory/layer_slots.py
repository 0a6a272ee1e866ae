"""The slots of layers that keep something else than the KV of every token.

Layers with a window forget old tokens, recurrent layers keep one state of them all. Such slots
belong to KV slots, and move with them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types import Scheduled, ScheduledStates

UNLIMITED = sys.maxsize


@dataclass(slots=True, frozen=True)
class StateRun:
    """One request's causal run [start, end) in a step."""

    row: int
    start: int
    end: int
    checkpoints: Sequence[int] = ()  # lengths at which to store the state, ascending, (start, end]


@dataclass(slots=True, frozen=True)
class KVOwners:
    """The KV slots in use, by owner."""

    ends: Mapping[int, int]  # positions up to which running requests have some, by row
    drafts: NDArray[np.int32]  # of draft nodes, without accepted ones
    cached: NDArray[np.int32]  # of the prefix cache
    in_use: NDArray[np.int32]  # of all owners


class LayerSlots:
    """Owns the slots of such layers, and is told whenever KV slots change hands. This class is for
    models without such layers.

    KV slots are int32 and distinct. A request is known by its row; ``ends`` are the positions, by
    row, up to which it has KV slots.
    """

    limits_prefixes = False
    """Whether `usable_len` of a cached prefix can be less than all of it."""

    def usable_len(self, kv_slots: NDArray[np.int32]) -> int:
        """The longest part of a cached prefix from which a request can go on."""
        return len(kv_slots)

    @property
    def fits_another(self) -> bool:
        """Whether one more request may run, of whatever length."""
        return True

    def can_admit(self, prefix: NDArray[np.int32], length: int, ends: Sequence[int]) -> bool:
        """Whether a request of ``length`` tokens can run beside those that do.

        ``prefix``: KV slots of its cached tokens, all of them usable.
        """
        return True

    def open(self, row: int, prefix: NDArray[np.int32], length: int) -> None:
        """Register a request of ``length`` tokens, whose prefix is locked."""

    def room(self, count: int) -> int:
        """How many of ``count`` tokens a run may have now."""
        return count

    @property
    def one_slot_rows(self) -> int:
        """Rows that can be one token longer now."""
        return UNLIMITED

    @property
    def run_room(self) -> int:
        """The longest run that one more request could have now."""
        return UNLIMITED

    @property
    def node_slots(self) -> int:
        """All slots of the pool that draft nodes take slots of."""
        return UNLIMITED

    def node_room(self, num_runs: int) -> int:
        """Draft nodes that a step of ``num_runs`` runs may have."""
        return UNLIMITED

    def assign(self, kv_slots: NDArray[np.int32]) -> None:
        """KV slots were allocated for a request or its draft nodes."""

    def advance(self, row: int, computed_len: int, shared_len: int) -> None:
        """A step was booked. The prefix cache owns the KV slots before ``shared_len``."""

    def replace(self, row: int, begin: int, old: NDArray[np.int32], new: NDArray[np.int32]) -> None:
        """The row's KV slots ``old`` from position ``begin`` on are about to be freed for ``new``,
        of the same tokens."""

    def share(self, row: int, kv_slots: NDArray[np.int32]) -> None:
        """The prefix cache has the row's first tokens, at ``kv_slots``."""

    def close(self, row: int, end: int, kv_slots: NDArray[np.int32]) -> None:
        """Remove a request whose KV slots end at position ``end``. The prefix cache has its first
        tokens, at ``kv_slots``; it may have none."""

    def forget(self, kv_slots: NDArray[np.int32]) -> None:
        """KV slots that nobody else holds are about to be freed."""

    def reset(self) -> None:
        """Every cached prefix was dropped."""

    def checkpoint_lengths(self, start: int, end: int, prompt_len: int) -> list[int]:
        """Token counts after which a run [start, end) should store its state, ascending."""
        return []

    def reserve(
        self, runs: Sequence[StateRun], counts: Sequence[int]
    ) -> Sequence[ScheduledStates | None]:
        """Slots for each run of a step and counts[i] draft nodes of run i, until `end_step`."""
        return [None] * len(runs)

    def commit(self, entries: Sequence[Scheduled], paths: Sequence[Sequence[int]]) -> None:
        """Each entry's tree nodes ``paths`` were accepted. It takes effect when `end_step` books
        the step."""

    def end_step(self, booked: bool) -> None:
        """Free what the step reserved and, if it is ``booked``, did not commit."""

    def counters(self) -> dict[str, float]:
        """Gauges for metrics."""
        return {}

    def check_integrity(self, kv: KVOwners) -> None:
        """Raise IntegrityError unless every slot has its owner."""
