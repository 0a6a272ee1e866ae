"""Ownership of KV slots: free slots, rows and the prefix cache, under one set of rules.

Every slot except the null slot has exactly one owner: the free stack, a node of the prefix cache, a
running request, or the draft nodes of a step. A running request's row, by position:

    [0, shared_len)              owned by the prefix cache, locked at the row's node
    [shared_len, allocated_len)  owned by the request
    [allocated_len, ...)         unowned; the table's entries there are meaningless

Only tokens whose KV has been computed enter the prefix cache.

Where the target has recurrent layers, or layers with a window that have a pool of their own,
`LayerSlots` does the same for their slots, and says how much of a cached prefix is usable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from rollout.errors import IntegrityError
from rollout.memory.layer_slots import KVOwners, LayerSlots, StateRun
from rollout.memory.prefix_cache import Node, PrefixCache
from rollout.memory.req_to_token import ReqToToken
from rollout.memory.routes_pool import RoutesPool
from rollout.memory.slots import SlotAllocator
from rollout.memory.state_slots import StateSizes, StateSlots
from rollout.memory.window_slots import WindowSizes, WindowSlots
from rollout.ops.ragged import ranges
from rollout.types import Scheduled, ScheduledStates


@dataclass(slots=True)
class _Row:
    node: Node  # locked; the end of [0, shared_len) in the prefix cache
    shared_len: int
    stale: bool = False  # holds KV from before reset(): never shared


@dataclass(slots=True, frozen=True)
class MemoryUsage:
    """Slots by owner. They add up to all slots."""

    free: int
    cached: int  # in the prefix cache, evictable
    used: int  # by running requests, shared prefixes included


@dataclass(slots=True)
class MemoryCounters:
    """Token counts over the memory's life."""

    looked_up: int = 0  # of admitted requests
    hit: int = 0  # of looked-up tokens, found in the prefix cache
    evicted: int = 0


class KVCacheManager:
    """Owns the slot pools and moves slots between them."""

    def __init__(
        self,
        num_slots: int,
        max_rows: int,
        max_context_len: int,
        prefix_cache: bool,
        states: StateSizes | None = None,
        routes: RoutesPool | None = None,
        windows: WindowSizes | None = None,
    ) -> None:
        """
        Args:
            states: None for a target without recurrent layers.
            routes: stores the experts of each token; None: they are not stored.
            windows: None if all layers store all tokens.
        """
        assert states is None or windows is None, "recurrent layers beside windows"
        self.routes = routes
        self.slots = SlotAllocator(num_slots)
        self.req_to_token = ReqToToken(max_rows, max_context_len)
        self.states = None if states is None else StateSlots(states, num_slots)
        self.windows: WindowSlots | None = None
        if windows is not None:
            self.windows = WindowSlots(windows, num_slots, self.req_to_token.table)
        kinds = (self.states, self.windows)
        self.layer_slots = next((each for each in kinds if each is not None), LayerSlots())
        self._free = partial(_free_with_layers, self.slots, self.layer_slots)
        self.prefix_cache = PrefixCache(self._free)
        self.shares_prefixes = prefix_cache
        # Tokens a sequence can grow to, whatever else runs: the context limit or all slots.
        self.max_sequence_len = min(max_context_len, num_slots)
        self.counters = MemoryCounters()
        # Counts up when entries of computed positions change in the row of req_to_token.
        self.row_versions = np.zeros(max_rows, dtype=np.int64)
        self._rows: dict[int, _Row] = {}
        self._allocated = [0] * max_rows  # allocated_len of each row held
        self._draft_slots = np.empty(0, dtype=np.int32)  # reserved by a step
        self._accepted = np.zeros(num_slots + 1, dtype=bool)  # reserved ones now in req_to_token

    @property
    def shares_unfinished(self) -> bool:
        """Whether others can use a part of a prompt before all of it is computed."""
        return self.shares_prefixes and not self.layer_slots.limits_prefixes

    @property
    def obtainable(self) -> int:
        """Slots that are free or evictable, so that no running request has to give any."""
        return self.slots.available + self.prefix_cache.evictable

    @property
    def usage(self) -> MemoryUsage:
        """Slots by owner, now."""
        free, cached = self.slots.available, self.prefix_cache.evictable
        return MemoryUsage(free=free, cached=cached, used=self.slots.num_slots - free - cached)

    def cached_len(self, tokens: np.ndarray) -> int:
        """Tokens (int32) that admit() would find cached now; at most all but the last."""
        if self.layer_slots.limits_prefixes:
            return self.layer_slots.usable_len(self.prefix_cache.match_slots(tokens[:-1]))
        return self.prefix_cache.match_len(tokens[:-1])

    def routed_experts(self, row: int, length: int) -> NDArray[np.integer] | None:
        """The experts that routers chose for the row's first ``length`` tokens: [length, L, X].

        None where they are not stored. ``row`` may be -1 if ``length`` is 0.
        """
        if self.routes is None:
            return None
        return self.routes.read(self.req_to_token.table[row, :length])

    def shared_len(self, row: int) -> int:
        """Positions of the row whose slots the prefix cache owns; other rows may share them."""
        return self._rows[row].shared_len

    def admit(
        self, tokens: np.ndarray, headroom: int, final_len: int = 0
    ) -> tuple[int, int] | None:
        """Give a request a row that holds its cached prefix. Returns (row, cached length).

        Returns None and changes nothing unless slots for the other tokens plus ``headroom`` are
        obtainable, and its layers' slots.

        Args:
            tokens: int32, all of the request's. The last is never cached: its logits are needed.
            headroom: slots that must stay obtainable.
            final_len: tokens that the request will reach for certain, if that is more.
        """
        if not self.layer_slots.fits_another:
            return None
        prefix = tokens[:-1]
        if self.layer_slots.limits_prefixes:
            prefix = prefix[: self.cached_len(tokens)]
        slots, node = self.prefix_cache.match(prefix)
        self.prefix_cache.lock(node)
        cached_len, length = len(slots), max(len(tokens), final_len)
        fits = len(tokens) - cached_len + headroom <= self.obtainable
        if not fits or not self.layer_slots.can_admit(slots, length, self._allocated):
            self.prefix_cache.unlock(node)
            return None
        row = self.req_to_token.allocate_row()
        self.req_to_token.table[row, :cached_len] = slots
        self.row_versions[row] += 1
        self._rows[row] = _Row(node=node, shared_len=cached_len)
        self._allocated[row] = cached_len
        self.layer_slots.open(row, slots, length)
        self.counters.looked_up += len(tokens)
        self.counters.hit += cached_len
        return row, cached_len

    def extend(self, row: int, end: int) -> int:
        """Allocate the row's slots up to position ``end``, or as far as eviction allows.

        Returns the position reached. Slots beyond ``end``, left by a step that failed, are freed.
        """
        table, begin = self.req_to_token.table, self._allocated[row]
        if end > begin:
            slots = self._allocate(min(self.layer_slots.room(end - begin), self.obtainable))
            end = begin + len(slots)
            table[row, begin:end] = slots
        elif end < begin:
            assert end >= self._rows[row].shared_len, "a shared prefix cannot be cut"
            self._free(table[row, end:begin])
        self._allocated[row] = end
        return end

    def extend_by_one(self, rows: list[int], ends: list[int]) -> bool:
        """Allocate one more slot for each row, at position ``ends``: `extend` for many rows at
        once.

        Returns False and changes nothing if a row's slots do not end there, or if too few slots are
        free.
        """
        if len(rows) > min(self.slots.available, self.layer_slots.one_slot_rows):
            return False
        if [self._allocated[row] for row in rows] != ends:
            return False
        self.req_to_token.table[rows, ends] = self._allocate(len(rows))
        for row in rows:
            self._allocated[row] += 1
        return True

    def reserve_drafts(self, counts: Sequence[int]) -> list[np.ndarray]:
        """Reserve slots for the draft nodes of a step: int32[counts[i]] for each i.

        Evicts if needed; callers must not ask for more than ``obtainable``. Slots stay reserved
        until end_step().
        """
        assert not self._draft_slots.size, "drafts of an earlier step are still reserved"
        slots = self._draft_slots = self._allocate(sum(counts))
        if not slots.size:
            return [slots] * len(counts)
        ends = accumulate(counts)
        return [slots[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def caches(self, row: int) -> bool:
        """Whether the row's KV is shared with later requests."""
        return self.shares_prefixes and not self._rows[row].stale

    def state_run(self, row: int, start: int, end: int, prompt_len: int) -> StateRun:
        """The run [start, end) of the row, with the token counts after which to store its state."""
        if not self.caches(row):
            return StateRun(row=row, start=start, end=end)
        wanted = self.layer_slots.checkpoint_lengths(start, end, prompt_len)
        return StateRun(row=row, start=start, end=end, checkpoints=wanted)

    def node_room(self, num_runs: int) -> int:
        """Draft nodes for which slots of each kind are obtainable in a step of ``num_runs``
        runs."""
        return min(self.obtainable, self.layer_slots.node_room(num_runs))

    @property
    def node_slots(self) -> int:
        """Slots of the smallest pool that draft nodes take slots of."""
        return min(self.slots.num_slots, self.layer_slots.node_slots)

    @property
    def run_room(self) -> int:
        """The longest run that one more request could have now."""
        return min(self.obtainable, self.layer_slots.run_room)

    def advance(self, row: int, computed_len: int) -> None:
        """Give back what the row's layers will not see again, now that a step is booked."""
        self.layer_slots.advance(row, computed_len, self._rows[row].shared_len)

    def reserve_states(
        self, runs: Sequence[StateRun], counts: Sequence[int]
    ) -> Sequence[ScheduledStates | None]:
        """Reserve state slots for each run of a step and for counts[i] draft nodes of run i.

        They stay reserved until end_step(). A list of None if the target has no recurrent layers.
        """
        return self.layer_slots.reserve(runs, counts)

    def commit(self, entries: Sequence[Scheduled], paths: Sequence[Sequence[int]]) -> None:
        """Advance KV and state of each entry along its accepted path (tree nodes, in order).

        The worker calls it once per step. The KV of accepted nodes becomes the row's; only slot ids
        are copied. The new state takes effect when end_step() books the step; until then the old
        state stays.
        """
        if any(paths):
            counts = [len(path) for path in paths]
            nodes_A = np.fromiter(chain.from_iterable(paths), dtype=np.int64, count=sum(counts))
            drafts = [entry.draft_slots for entry in entries]
            # Indices into the concatenated draft slots: an entry's tree node 1 is its first slot.
            before = list(accumulate([slots.size for slots in drafts], initial=-1))
            slots_A = np.concatenate(drafts).take(nodes_A + np.array(before[:-1]).repeat(counts))
            rows, ends = [entry.request.row for entry in entries], [entry.end for entry in entries]
            allocated = [self._allocated[row] for row in rows]
            assert allocated == ends, f"runs ended at {ends}, slots at {allocated}"
            for row, count in zip(rows, counts, strict=True):
                self._allocated[row] += count
            width = self.req_to_token.max_context_len
            firsts = [row * width + end for row, end in zip(rows, ends, strict=True)]
            indices_A = ranges(np.array(firsts), np.array(counts))
            self.req_to_token.table.reshape(-1)[indices_A] = slots_A
            self._accepted[slots_A] = True
        self.layer_slots.commit(entries, paths)

    def end_step(self, *, booked: bool = False) -> None:
        """Free the step's reserved slots that commit() did not accept. May be called again.

        ``booked``: requests continue from the committed states. Otherwise the step will run again,
        and they keep the states it began with.
        """
        slots = self._draft_slots
        if slots.size:
            unaccepted = self._unaccepted()
            self._draft_slots = slots[:0]
            self._accepted[slots] = False
            self._free(unaccepted)
        self.layer_slots.end_step(booked)

    def share(self, row: int, tokens: Sequence[int]) -> None:
        """Let other requests use the KV of the row's first ``tokens``, all of them computed.

        Where the prefix cache holds some of them already, the row switches to its slots.
        """
        state = self._rows[row]
        if not self.shares_prefixes or state.stale:
            return
        node = self._hand_over(row, state, tokens)
        self.prefix_cache.lock(node)
        self.prefix_cache.unlock(state.node)
        self.row_versions[row] += 1
        state.node, state.shared_len = node, len(tokens)
        self.layer_slots.share(row, self.prefix_cache.path_slots(node))

    def release(self, row: int, tokens: Sequence[int]) -> None:
        """Free the row. The KV and states of its first ``tokens``, all computed, stay cached."""
        state, node = self._rows[row], None
        owned_from = state.shared_len
        if self.caches(row) and len(tokens) >= owned_from:
            node = self._hand_over(row, state, tokens) if len(tokens) > owned_from else state.node
            owned_from = len(tokens)
        del self._rows[row]
        cached = self.prefix_cache.path_slots(node) if node else np.empty(0, dtype=np.int32)
        self.layer_slots.close(row, self._allocated[row], cached)
        self._free(self.req_to_token.table[row, owned_from : self._allocated[row]])
        self.prefix_cache.unlock(state.node)
        self.req_to_token.free_row(row)

    def reset(self) -> None:
        """Drop every cached prefix: the weights changed.

        Rows still held (an update that keeps running requests' KV) keep their slots, but nothing
        in them is shared with later requests.
        """
        self.prefix_cache.reset()
        self.layer_slots.reset()
        for state in self._rows.values():
            state.stale = True

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot and row has exactly one owner. O(slots)."""
        self.prefix_cache.check_integrity(state.node for state in self._rows.values())
        self.req_to_token.check_integrity(self._rows)
        for row, state in self._rows.items():
            shared = self.req_to_token.table[row, : state.shared_len]
            if not np.array_equal(shared, self.prefix_cache.path_slots(state.node)):
                raise IntegrityError(f"row {row}'s shared prefix is not the prefix cache's")
        self.slots.check_integrity(self._held_slots())
        cached, in_use = (
            np.concatenate([np.empty(0, dtype=np.int32), *held])
            for held in (self.prefix_cache.held_slots(), self._held_slots())
        )
        ends = {row: self._allocated[row] for row in self._rows}
        self.layer_slots.check_integrity(
            KVOwners(ends=ends, drafts=self._unaccepted(), cached=cached, in_use=in_use)
        )

    def _held_slots(self) -> Iterator[np.ndarray]:
        yield from self.prefix_cache.held_slots()
        for row, state in self._rows.items():
            yield self.req_to_token.table[row, state.shared_len : self._allocated[row]]
        yield self._unaccepted()

    def _unaccepted(self) -> NDArray[np.int32]:
        """Slots of draft nodes that are no row's."""
        return self._draft_slots[~self._accepted[self._draft_slots]]

    def _allocate(self, count: int) -> np.ndarray:
        missing = count - self.slots.available
        if missing > 0:
            self.counters.evicted += self.prefix_cache.evict(missing)
        slots = self.slots.allocate(count)
        self.layer_slots.assign(slots)
        return slots

    def _hand_over(self, row: int, state: _Row, tokens: Sequence[int]) -> Node:
        """Move [shared_len, len(tokens)) from the request to the prefix cache.

        [shared_len, held) was cached already: the row switches to the cache's slots, and the
        request's copies are freed. The cache owns [held, len(tokens)) from here on.
        """
        assert state.shared_len <= len(tokens) <= self._allocated[row]
        slots = self.req_to_token.table[row, : len(tokens)]
        held, node = self.prefix_cache.insert(np.array(tokens, dtype=np.int32), slots)
        copies = slots[state.shared_len : held].copy()
        if len(copies):
            slots[:] = self.prefix_cache.path_slots(node)
            cached = slots[state.shared_len : held]
            self.layer_slots.replace(row, state.shared_len, copies, cached)
            self._free(copies)
        return node


def _free_with_layers(
    slots: SlotAllocator, layer_slots: LayerSlots, freed: NDArray[np.int32]
) -> None:
    """Free KV slots and the slots of layers that belong to them."""
    layer_slots.forget(freed)
    slots.free(freed)
