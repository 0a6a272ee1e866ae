"""Ownership of the slots of layers with a window.

In these layers no row reads keys older than the window. They therefore have a pool of their own,
whose slots go back when no window will see their token again: a *window slot* belongs to a KV slot
that is in use, and `WindowSlots.slot_of` finds it. By KV slot it is

    held        by running requests that still see the token, or by the draft nodes of a step;
    kept        by nobody, for a later request with the same prefix: evicted, oldest first;
    given back  the KV slot has no window slot.

A request holds the positions [first, allocated_len) of its row. Tokens behind its window are given
back if they are its own, and kept if the prefix cache has them. A cached prefix is usable up to a
length before which all keys of a window are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.errors import IntegrityError
from rollout.memory.layer_slots import KVOwners, LayerSlots
from rollout.memory.slots import NULL_SLOT, SlotAllocator

_GIVE_BACK = 8  # an eighth of a window has piled up behind a request when it gives that back
_HEADROOM = 16  # tokens that a request may grow by before another one's admission counts them
_MAX_OUTDATED = 4096  # entries of the queue of kept slots that may be outdated


@dataclass(slots=True, frozen=True)
class WindowSizes:
    """The number of window slots, and the keys that a row sees."""

    num_slots: int  # at least ``span``
    window: int

    @property
    def span(self) -> int:
        """Most slots of a request between two steps, and in a step that decodes one token."""
        return self.window + self.slack

    @property
    def slack(self) -> int:
        """Tokens behind the window that are given back together."""
        return max(1, self.window // _GIVE_BACK)


@dataclass(slots=True)
class _Row:
    first: int  # position of the first token that it holds
    length: int  # tokens that it was admitted with


class WindowSlots(LayerSlots):
    """Moves window slots between owners. Arrays are int32, of distinct KV slots."""

    limits_prefixes = True

    def __init__(self, sizes: WindowSizes, num_kv_slots: int, table: NDArray[np.int32]) -> None:
        """``table``: req_to_token."""
        assert sizes.num_slots >= sizes.span, "no request could run"
        self.sizes = sizes
        self.slots = SlotAllocator(sizes.num_slots)
        self.slot_of = np.full(num_kv_slots + 1, NULL_SLOT, dtype=np.int32)
        self.evicted = 0  # kept slots that were evicted, over the memory's life
        self._table = table
        self._rows: dict[int, _Row] = {}
        self._holds = np.zeros(num_kv_slots + 1, dtype=np.int32)
        # Kept slots in the order in which they were let go. An entry of the queue is outdated where
        # `_kept_at` has another number.
        self._kept_at = np.zeros(num_kv_slots + 1, dtype=np.int64)  # 0: not kept
        self._queue: deque[tuple[int, NDArray[np.int32]]] = deque()
        self._queued = 0
        self._num_kept = 0
        self._clock = 0

    @property
    def obtainable(self) -> int:
        """Slots that are free or kept, so that no running request has to give any."""
        return self.slots.available + self._num_kept

    def usable_len(self, kv_slots: NDArray[np.int32]) -> int:
        """The longest part of a cached prefix whose last ``window - 1`` tokens, or all of them,
        have window slots."""
        lengths = np.arange(len(kv_slots) + 1)
        is_gap = np.concatenate([[False], self.slot_of[kv_slots] == NULL_SLOT])
        after_gap = np.maximum.accumulate(np.where(is_gap, lengths, 0))
        usable = (lengths - after_gap >= self.sizes.window - 1) | (after_gap == 0)
        return int(np.flatnonzero(usable)[-1])

    def can_admit(self, prefix: NDArray[np.int32], length: int, ends: Sequence[int]) -> bool:
        seen = prefix[max(0, len(prefix) - self.sizes.window + 1) :]
        taken = int(np.count_nonzero(self._kept_at[seen]))
        wanted = max(1, self._span(length) - len(seen))
        for row, state in self._rows.items():
            end = ends[row]
            wanted += max(0, self._span(max(state.length, end)) - (end - state.first))
        return wanted <= self.obtainable - taken

    def _span(self, length: int) -> int:
        return min(self.sizes.span, length + _HEADROOM)

    def open(self, row: int, prefix: NDArray[np.int32], length: int) -> None:
        """Register a request of ``length`` tokens, which holds what it sees of its prefix."""
        first = max(0, len(prefix) - self.sizes.window + 1)
        self._rows[row] = _Row(first=first, length=length)
        self._hold(prefix[first:])

    def room(self, count: int) -> int:
        """How many of ``count`` tokens a run may have. Long ones leave each request a slot."""
        spare = self.obtainable - (len(self._rows) if count > 1 else 0)
        return min(count, max(spare, min(1, self.obtainable)))

    @property
    def one_slot_rows(self) -> int:
        return self.obtainable

    @property
    def node_slots(self) -> int:
        """All window slots: a draft node takes one."""
        return self.sizes.num_slots

    def node_room(self, num_runs: int) -> int:
        """Draft nodes for which there are slots."""
        return self.obtainable

    @property
    def run_room(self) -> int:
        return max(0, self.obtainable - len(self._rows) - 1)

    def assign(self, kv_slots: NDArray[np.int32]) -> None:
        """Give new KV slots of a request, or of its draft nodes, a window slot each. Evicts."""
        missing = len(kv_slots) - self.slots.available
        if missing > 0:
            self._evict(missing)
        self.slot_of[kv_slots] = self.slots.allocate(len(kv_slots))
        self._holds[kv_slots] = 1

    def advance(self, row: int, computed_len: int, shared_len: int) -> None:
        """Let go of what the request will not see again.

        One token more than its window is held: samples of its prompt begin before the last one.
        """
        state, end = self._rows[row], computed_len - self.sizes.window
        if end - state.first < self.sizes.slack:
            return
        own = min(end, max(state.first, shared_len))
        self._let_go(self._table[row, state.first : own])
        self.forget(self._table[row, own:end])
        state.first = end

    def replace(self, row: int, begin: int, old: NDArray, new: NDArray) -> None:
        """New KV slots that lack a window slot take over the row's."""
        skipped = max(0, self._rows[row].first - begin)
        old, new = old[skipped:], new[skipped:]
        lacks = self.slot_of[new] == NULL_SLOT
        taken, given = new[lacks], old[lacks]
        self.slot_of[taken], self._holds[taken] = self.slot_of[given], self._holds[given]
        self.slot_of[given], self._holds[given] = NULL_SLOT, 0
        self._hold(new[~lacks])

    def close(self, row: int, end: int, kv_slots: NDArray[np.int32]) -> None:
        """Remove a request whose slots end at ``end``. Nothing is given back here: KV slots that
        are freed next give theirs back in `forget`."""
        self._let_go(self._table[row, self._rows.pop(row).first : end])

    def forget(self, kv_slots: NDArray[np.int32]) -> None:
        """Free the window slots of KV slots that nobody else holds, for example with them."""
        gone = kv_slots[self.slot_of[kv_slots] != NULL_SLOT]
        self._num_kept -= int(np.count_nonzero(self._kept_at[gone]))
        self._holds[gone] = self._kept_at[gone] = 0
        self.slots.free(self.slot_of[gone])
        self.slot_of[gone] = NULL_SLOT

    def counters(self) -> dict[str, float]:
        """Gauges for metrics, in window slots."""
        return {
            "windows/used": self.sizes.num_slots - self.obtainable,
            "windows/cached": self._num_kept,
            "windows/free": self.slots.available,
            "windows/evicted": self.evicted,
        }

    def held(self, row: int, end: int) -> int:
        """Slots that a request holds, whose row is allocated up to ``end``."""
        return end - self._rows[row].first

    def check_integrity(self, kv: KVOwners) -> None:
        """Raise IntegrityError unless every window slot is free, held or kept, and counted
        right."""

        def require(ok: bool | np.bool_, problem: str) -> None:
            if not ok:
                raise IntegrityError(f"window slots: {problem}")

        require(self._rows.keys() == kv.ends.keys(), "the rows are others")
        held = [self._table[row, self._rows[row].first : end] for row, end in kv.ends.items()]
        every = np.concatenate([np.empty(0, dtype=np.int32), *held, kv.drafts])
        holds = np.bincount(every, minlength=len(self._holds))
        require(np.array_equal(holds, self._holds), "holds are counted wrongly")
        has = self.slot_of != NULL_SLOT
        require(has[every].all(), "a held token has none")
        require(np.isin(np.flatnonzero(has), kv.in_use).all(), "one outlived its KV slot")
        kept = has & (holds == 0)
        require(np.array_equal(kept, self._kept_at > 0), "those kept are others")
        require(np.count_nonzero(kept) == self._num_kept, "those kept are counted wrongly")
        queued = [slots[self._kept_at[slots] == at] for at, slots in self._queue]
        found = np.sort(np.concatenate([np.empty(0, dtype=np.int32), *queued]))
        require(np.array_equal(found, np.flatnonzero(kept)), "the queue lacks one, or has it twice")
        self.slots.check_integrity([self.slot_of[has]])

    def _hold(self, kv_slots: NDArray[np.int32]) -> None:
        self._num_kept -= int(np.count_nonzero(self._kept_at[kv_slots]))
        self._kept_at[kv_slots] = 0
        self._holds[kv_slots] += 1

    def _let_go(self, kv_slots: NDArray[np.int32]) -> None:
        self._holds[kv_slots] -= 1
        last = kv_slots[self._holds[kv_slots] == 0]  # a copy
        if not len(last):
            return
        self._clock += 1
        self._kept_at[last] = self._clock
        self._num_kept += len(last)
        self._queue.append((self._clock, last))
        self._queued += len(last)
        if self._queued > 2 * self._num_kept + _MAX_OUTDATED:
            current = ((at, slots[self._kept_at[slots] == at]) for at, slots in self._queue)
            self._queue = deque((at, slots) for at, slots in current if len(slots))
            self._queued = self._num_kept

    def _evict(self, count: int) -> None:
        """Free ``count`` kept slots in the order in which they were let go. There must be as
        many."""
        self.evicted += count
        while count:
            at, slots = self._queue.popleft()
            self._queued -= len(slots)
            slots = slots[self._kept_at[slots] == at]
            self.forget(slots[:count])
            if left := max(0, len(slots) - count):
                self._queue.appendleft((at, slots[-left:]))
                self._queued += left
            count -= len(slots) - left
