"""The allocator of slots. A KV slot is one token's row in every layer's KV storage."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rollout.errors import IntegrityError

NULL_SLOT = 0
"""Padding rows read and write this slot; it is never allocated."""


class SlotAllocator:
    """A stack of free slot ids.

    Ids are ``[1, num_slots]``; the storage has one more row, for the null slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._stack = np.empty(num_slots, dtype=np.int32)
        self._available = 0
        self.reset()

    @property
    def available(self) -> int:
        """Slots that are free now."""
        return self._available

    def allocate(self, count: int) -> np.ndarray:
        """Take ``count`` slots: int32[count], ascending while the pool is new."""
        assert 0 <= count <= self._available, f"{count} slots wanted, {self._available} free"
        bottom = self._available - count
        slots = self._stack[bottom : self._available][::-1].copy()
        self._available = bottom
        return slots

    def free(self, slots: np.ndarray) -> None:
        """Return slots. The next ``allocate`` takes them in the same order."""
        top = self._available + len(slots)
        assert top <= self.num_slots, "more slots freed than were allocated"
        self._stack[self._available : top] = slots[::-1]
        self._available = top

    def reset(self) -> None:
        """Make every slot free again."""
        self._stack[:] = np.arange(self.num_slots, NULL_SLOT, -1)
        self._available = self.num_slots

    def check_integrity(self, held: Iterable[np.ndarray]) -> None:
        """Raise IntegrityError unless every slot is free or in ``held`` exactly once, null never.

        ``held``: int32 arrays, the slots of every owner.
        """
        slots = np.concatenate([self._stack[: self._available], *held])
        if len(slots) and (slots.min() < 0 or slots.max() > self.num_slots):
            raise IntegrityError(f"slot ids outside [0, {self.num_slots}]")
        counts = np.bincount(slots, minlength=self.num_slots + 1)
        if counts[NULL_SLOT]:
            raise IntegrityError("the null slot was allocated")
        twice = np.flatnonzero(counts > 1)
        if len(twice):
            raise IntegrityError(f"slots with two owners, or freed twice: {twice[:8].tolist()}")
        lost = np.flatnonzero(counts[1:] == 0) + 1
        if len(lost):
            raise IntegrityError(f"slots neither free nor held: {lost[:8].tolist()}")
