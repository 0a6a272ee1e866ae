"""Checkpoints: stored states of cached prefixes, from which a request can continue.

The radix tree knows the KV slot of each cached position, and no two positions share one. So the
state after a prefix is stored under the KV slot of its last token. Nodes of the tree can then be
split and cut without moving checkpoints, and a checkpoint is freed with its token.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import numpy as np

from rollout.errors import IntegrityError
from rollout.memory.slots import NULL_SLOT, SlotAllocator


class StateCheckpoints:
    """Owns the state slots of checkpoints and frees them to ``state_slots``.

    A checkpoint is pinned while a running request begins with it, and is then not evicted. Unpinned
    ones are evicted least recently used first.
    """

    def __init__(self, state_slots: SlotAllocator, num_kv_slots: int) -> None:
        self._state_slots = state_slots
        self._state_of = np.full(num_kv_slots + 1, NULL_SLOT, dtype=np.int32)  # by KV slot
        self._by_age: dict[int, None] = {}  # KV slots with an unpinned one, least recent first
        self._pins: dict[int, int] = {}  # KV slots with a pinned one: how often

    def __len__(self) -> int:
        return len(self._by_age) + len(self._pins)

    @property
    def evictable(self) -> int:
        """State slots that `evict` can free now."""
        return len(self._by_age)

    def deepest(self, kv_slots: np.ndarray) -> int:
        """Length in tokens of the longest part of a cached prefix that has a checkpoint; 0: none.

        ``kv_slots``: int32, of the prefix.
        """
        found = np.flatnonzero(self._state_of[kv_slots])
        return int(found[-1]) + 1 if len(found) else 0

    def at(self, kv_slot: int) -> int:
        """The state slot of the checkpoint there, or the null slot."""
        return int(self._state_of[kv_slot])

    def put(self, kv_slot: int, state_slot: int) -> None:
        """Add a checkpoint, unpinned and most recently used. There must be none at ``kv_slot``."""
        assert self._state_of[kv_slot] == NULL_SLOT, "a second checkpoint of the same prefix"
        self._state_of[kv_slot] = state_slot
        self._by_age[kv_slot] = None

    def touch(self, kv_slot: int) -> None:
        """Mark an unpinned checkpoint as most recently used."""
        if kv_slot in self._by_age:
            del self._by_age[kv_slot]
            self._by_age[kv_slot] = None

    def pin(self, kv_slot: int) -> None:
        """Protect a checkpoint until unpinned as often. Its token must be locked as long."""
        self._by_age.pop(kv_slot, None)
        self._pins[kv_slot] = self._pins.get(kv_slot, 0) + 1

    def unpin(self, kv_slot: int) -> None:
        """Undo one `pin`."""
        self._pins[kv_slot] -= 1
        if not self._pins[kv_slot]:
            del self._pins[kv_slot]
            self._by_age[kv_slot] = None

    def evict(self, count: int) -> int:
        """Free ``count`` state slots, or fewer if fewer are evictable. Returns how many."""
        oldest = list(itertools.islice(self._by_age, count))
        self.forget(np.array(oldest, dtype=np.int32))
        return len(oldest)

    def forget(self, kv_slots: np.ndarray) -> None:
        """Free the state slots of the checkpoints at these KV slots, for example with their
        tokens."""
        gone = kv_slots[self._state_of[kv_slots] != NULL_SLOT]
        if not len(gone):
            return
        for kv_slot in gone.tolist():
            del self._by_age[kv_slot]  # never pinned: a pinned one's token is locked
        self._state_slots.free(self._state_of[gone])
        self._state_of[gone] = NULL_SLOT

    def reset(self) -> None:
        """Free all unpinned checkpoints. Pinned ones stay until unpinned, and no lookup finds
        them."""
        self.evict(len(self._by_age))

    def held_slots(self) -> np.ndarray:
        """The state slots of all checkpoints, int32."""
        return self._state_of[[*self._by_age, *self._pins]]

    def check_integrity(self, pinned: Iterable[int], cached: np.ndarray) -> None:
        """Raise IntegrityError unless the counts are right and every checkpoint has its token.

        Args:
            pinned: the KV slot of every pin now held, as often as it was pinned.
            cached: int32, all KV slots of the prefix cache.
        """
        counts = dict(Counter(pinned))
        if counts != self._pins:
            raise IntegrityError(f"state checkpoints: pins {self._pins}, holders {counts}")
        known = sorted([*self._by_age, *self._pins])
        if known != np.flatnonzero(self._state_of).tolist():
            raise IntegrityError("state checkpoints: the index and the ages disagree")
        if not np.isin(known, cached).all():
            raise IntegrityError("state checkpoints: one outlived its token")
