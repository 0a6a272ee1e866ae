"""The index side of KV memory: free slots, rows and the prefix cache, under one set of rules.

Who owns a slot. Every slot is in exactly one place: free; the null slot; a node of the prefix
cache; a running request; reserved for the draft nodes of a step under way. A running request's
row, by position:

    [0, shared_len)              the prefix cache's, locked at the row's node
    [shared_len, allocated_len)  the request's own
    [allocated_len, ...)         nobody's; what the table says there means nothing

Only tokens whose KV has been computed enter the prefix cache.

Where the target has recurrent layers, `StateSlots` does the same for states, and a cached prefix is
of use only as far as a state was kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from rollout.errors import IntegrityError
from rollout.memory.prefix_cache import Node, PrefixCache
from rollout.memory.req_to_token import ReqToToken
from rollout.memory.routes_pool import RoutesPool
from rollout.memory.slots import NULL_SLOT, SlotAllocator
from rollout.memory.state_checkpoints import CheckpointedSlots
from rollout.memory.state_slots import StateRun, StateSizes, StateSlots
from rollout.ops.ragged import ranges
from rollout.types import Scheduled, ScheduledStates


@dataclass(slots=True)
class _Row:
    node: Node  # locked; where [0, shared_len) ends in the prefix cache
    shared_len: int
    stale: bool = False  # holds KV from before reset(): never shared


@dataclass(slots=True, frozen=True)
class MemoryUsage:
    """Slots by state; they add up to all there are."""

    free: int
    cached: int  # in the prefix cache, evictable
    used: int  # by running requests, shared prefixes included


@dataclass(slots=True)
class MemoryCounters:
    """Tokens, over the memory's life."""

    looked_up: int = 0  # of admitted requests
    hit: int = 0  # of those, found in the prefix cache
    evicted: int = 0


class CacheMemory:
    """Bundles the pools and moves slots between them."""

    def __init__(
        self,
        num_slots: int,
        max_rows: int,
        max_context_len: int,
        prefix_cache: bool,
        states: StateSizes | None = None,
        routes: RoutesPool | None = None,
    ) -> None:
        """
        Args:
            states: None for a target without recurrent layers.
            routes: what is kept of routers' choices; None: nothing is.
        """
        self.routes = routes
        self.slots = SlotAllocator(num_slots)
        self.req_to_token = ReqToToken(max_rows, max_context_len)
        self.states = None if states is None else StateSlots(states, num_slots)
        self.prefix_cache = PrefixCache(
            self.slots
            if self.states is None
            else CheckpointedSlots(self.slots, self.states.checkpoints)
        )
        self.shares_prefixes = prefix_cache
        # Tokens a sequence can grow to, whatever else runs: the context, or all of the slots.
        self.max_sequence_len = min(max_context_len, num_slots)
        self.counters = MemoryCounters()
        # Counts up when what a row's table already says of computed positions changes.
        self.row_versions = np.zeros(max_rows, dtype=np.int64)
        self._rows: dict[int, _Row] = {}
        self._allocated = [0] * max_rows  # allocated_len of each row held
        self._draft_slots: dict[int, NDArray[np.int32]] = {}  # reserved, by step
        self._accepted = np.zeros(num_slots + 1, dtype=bool)  # of those, now in req_to_token

    @property
    def obtainable(self) -> int:
        """Slots that can be had without touching a running request: free or evictable."""
        return self.slots.available + self.prefix_cache.evictable

    @property
    def usage(self) -> MemoryUsage:
        free, cached = self.slots.available, self.prefix_cache.evictable
        return MemoryUsage(free=free, cached=cached, used=self.slots.num_slots - free - cached)

    def cached_len(self, tokens: np.ndarray) -> int:
        """How many tokens admit() would find cached now: at most all but the last. int32 in."""
        if self.states is None:
            return self.prefix_cache.match_len(tokens[:-1])
        return self.states.checkpoints.deepest(self.prefix_cache.match_slots(tokens[:-1]))

    def routed_experts(self, row: int, length: int) -> NDArray[np.integer] | None:
        """The experts that routers chose for the row's first ``length`` tokens: [length, L, X].

        None where it is not kept. ``row``: -1 where ``length`` is 0.
        """
        if self.routes is None:
            return None
        return self.routes.read(self.req_to_token.table[row, :length])

    def shared_len(self, row: int) -> int:
        """Positions of the row whose slots are the prefix cache's, and may be others' too."""
        return self._rows[row].shared_len

    def admit(self, tokens: np.ndarray, headroom: int) -> tuple[int, int] | None:
        """Give a request a row with its cached prefix in it. Returns (row, cached length).

        ``tokens``: int32, all of the request's. At least the last is left to run, since its logits
        are wanted. None, and nothing changed, unless the other tokens' slots and ``headroom`` more
        can be had besides, and the states of one request more.
        """
        prefix = tokens[:-1]
        if self.states is not None:
            if not self.states.has_seat:
                return None
            prefix = prefix[: self.cached_len(tokens)]
        slots, node = self.prefix_cache.match(prefix)
        self.prefix_cache.lock(node)
        cached_len = len(slots)
        if len(tokens) - cached_len + headroom > self.obtainable:
            self.prefix_cache.unlock(node)
            return None
        row = self.req_to_token.allocate_row()
        self.req_to_token.table[row, :cached_len] = slots
        self.row_versions[row] += 1
        self._rows[row] = _Row(node=node, shared_len=cached_len)
        self._allocated[row] = cached_len
        if self.states is not None:
            self.states.open(row, cached_len, int(slots[-1]) if cached_len else NULL_SLOT)
        self.counters.looked_up += len(tokens)
        self.counters.hit += cached_len
        return row, cached_len

    def extend(self, row: int, end: int) -> int:
        """Make the row's slots reach position ``end``, or as far as evicting carries.

        Returns the position reached. Slots beyond ``end``, which a step that failed may have left,
        are freed.
        """
        table, begin = self.req_to_token.table, self._allocated[row]
        if end > begin:
            slots = self._allocate(min(end - begin, self.obtainable))
            end = begin + len(slots)
            table[row, begin:end] = slots
        elif end < begin:
            assert end >= self._rows[row].shared_len, "a shared prefix cannot be cut"
            self.slots.free(table[row, end:begin])
        self._allocated[row] = end
        return end

    def extend_by_one(self, rows: list[int], ends: list[int]) -> bool:
        """Make the slots of each row, which reach its end, reach one position more.

        As `extend` does one by one. False, and nothing done, where a row's slots reach elsewhere
        or there are not as many free ones.
        """
        if len(rows) > self.slots.available or [self._allocated[row] for row in rows] != ends:
            return False
        self.req_to_token.table[rows, ends] = self.slots.allocate(len(rows))
        for row in rows:
            self._allocated[row] += 1
        return True

    @property
    def num_reserved(self) -> int:
        """Slots that steps under way have for draft nodes."""
        return sum(len(slots) for slots in self._draft_slots.values())

    def reserve_drafts(self, counts: Sequence[int], step: int = 0) -> list[np.ndarray]:
        """Slots for the draft nodes of a step: int32[counts[i]] for each i.

        Evicts, never more than ``obtainable``: callers count first. They stay reserved until
        end_step() of the same ``step``: a number that no other step under way has.
        """
        assert step not in self._draft_slots, f"drafts of step {step} are still reserved"
        slots = self._draft_slots[step] = self._allocate(sum(counts))
        if not slots.size:
            return [slots] * len(counts)
        ends = accumulate(counts)
        return [slots[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def caches(self, row: int) -> bool:
        """Whether what is computed for the row is shared with later requests."""
        return self.shares_prefixes and not self._rows[row].stale

    def state_run(self, row: int, start: int, end: int, prompt_len: int) -> StateRun:
        """A run [start, end) of the row, as far as states are concerned."""
        if self.states is None or not self.caches(row):
            return StateRun(row=row, start=start, end=end)
        wanted = self.states.worth_keeping(start, end, prompt_len)
        return StateRun(row=row, start=start, end=end, checkpoints=wanted)

    def node_room(self, num_runs: int) -> int:
        """Draft nodes for which slots can be had in a step of so many runs."""
        if self.states is None:
            return self.obtainable
        return min(self.obtainable, self.states.node_room(num_runs))

    def reserve_states(
        self, runs: Sequence[StateRun], counts: Sequence[int], step: int = 0
    ) -> Sequence[ScheduledStates | None]:
        """Slots for the states of a step: each run's, and of counts[i] draft nodes of run i.

        They stay reserved until end_step(). None for each where the target has no states.
        """
        if self.states is None:
            return [None] * len(runs)
        return self.states.reserve(runs, counts, step)

    def commit(self, entries: Sequence[Scheduled], paths: Sequence[Sequence[int]]) -> None:
        """Move KV and state of each entry along its accepted path: tree nodes, in order.

        Called by the worker, once per step. The KV is where the row's table says from then on; the
        state counts once the step is booked, and until then what it began with stays.
        """
        if any(paths):
            counts = [len(path) for path in paths]
            nodes_A = np.fromiter(chain.from_iterable(paths), dtype=np.int64, count=sum(counts))
            drafts = [entry.draft_slots for entry in entries]
            # Among all of those, an entry's node 1 is its first.
            before = list(accumulate([slots.size for slots in drafts], initial=-1))
            self.commit_paths(
                [entry.request.row for entry in entries],
                [entry.end for entry in entries],
                counts,
                np.concatenate(drafts).take(nodes_A + np.array(before[:-1]).repeat(counts)),
            )
        if self.states is not None:
            for entry, path in zip(entries, paths, strict=True):
                self.states.commit(entry, path)

    def commit_paths(
        self,
        rows: list[int],
        ends: list[int],
        counts: list[int],
        accepted_slots: NDArray[np.int32],
    ) -> None:
        """Accept draft nodes: their KV becomes each row's at positions [end, end + count).

        ``ends``: where the entries' runs ended. ``accepted_slots``: the reserved slots of the nodes
        on the accepted paths, in order, one entry's behind the other's. At most once per entry and
        step; nothing is copied but slot ids.
        """
        allocated = [self._allocated[row] for row in rows]
        assert allocated == ends, f"runs ended at {ends}, slots at {allocated}"
        for row, count in zip(rows, counts, strict=True):
            self._allocated[row] += count
        width = self.req_to_token.max_context_len
        firsts = [row * width + end for row, end in zip(rows, ends, strict=True)]
        places_A = ranges(np.array(firsts), np.array(counts))
        self.req_to_token.table.reshape(-1)[places_A] = accepted_slots
        self._accepted[accepted_slots] = True

    def end_step(self, step: int = 0, *, booked: bool = False) -> None:
        """Free the step's reserved draft slots that no commit_paths() took. May be called again.

        ``booked``: requests go on from what commit() made theirs. Else the step is to be run again,
        and their states are what it began with.
        """
        slots = self._draft_slots.pop(step, None)
        if slots is not None and slots.size:
            accepted = self._accepted.take(slots)
            self._accepted[slots] = False
            self.slots.free(slots[~accepted])
        if self.states is not None:
            self.states.end_step(step, booked)

    def drop_steps(self, but: Collection[int] = ()) -> None:
        """End all steps that never ended, as ones to be run again, but for those under way."""
        reserved = set(self._draft_slots)
        if self.states is not None:
            reserved |= self.states.reserved_steps
        for step in reserved.difference(but):
            self.end_step(step)

    def share(self, row: int, tokens: Sequence[int]) -> None:
        """Let other requests use the KV of the row's first ``tokens``, all of them computed.

        Where the tree holds some of them already, the row moves over to the tree's slots.
        """
        state = self._rows[row]
        if not self.shares_prefixes or state.stale:
            return
        node = self._hand_over(row, state, tokens)
        self.prefix_cache.lock(node)
        self.prefix_cache.unlock(state.node)
        self.req_to_token.table[row, : len(tokens)] = self.prefix_cache.path_slots(node)
        self.row_versions[row] += 1
        state.node, state.shared_len = node, len(tokens)
        if self.states is not None:
            self.states.keep(row, self.prefix_cache.path_slots(node))

    def release(self, row: int, tokens: Sequence[int]) -> None:
        """Take the row back. The KV of its first ``tokens``, all computed, stays cached, and so do
        its states."""
        state, node = self._rows[row], None
        owned_from = state.shared_len
        if self.caches(row) and len(tokens) >= owned_from:
            node = self._hand_over(row, state, tokens) if len(tokens) > owned_from else state.node
            owned_from = len(tokens)
        del self._rows[row]
        if self.states is not None:
            no_slots = np.empty(0, dtype=np.int32)
            self.states.close(row, self.prefix_cache.path_slots(node) if node else no_slots)
        self.slots.free(self.req_to_token.table[row, owned_from : self._allocated[row]])
        self.prefix_cache.unlock(state.node)
        self.req_to_token.free_row(row)

    def reset(self) -> None:
        """Drop every cached prefix: the weights changed.

        Rows still held (an update that keeps running requests' KV) keep their slots, but nothing
        in them is shared with later requests.
        """
        self.prefix_cache.reset()
        if self.states is not None:
            self.states.reset()
        for state in self._rows.values():
            state.stale = True

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot and row is in exactly one place. O(slots)."""
        self.prefix_cache.check_integrity(state.node for state in self._rows.values())
        self.req_to_token.check_integrity(self._rows)
        for row, state in self._rows.items():
            shared = self.req_to_token.table[row, : state.shared_len]
            if not np.array_equal(shared, self.prefix_cache.path_slots(state.node)):
                raise IntegrityError(f"row {row}'s shared prefix is not the prefix cache's")
        self.slots.check_integrity(self._held_slots())
        if self.states is not None:
            cached = [np.empty(0, dtype=np.int32), *self.prefix_cache.held_slots()]
            self.states.check_integrity(np.concatenate(cached))

    def _held_slots(self) -> Iterator[np.ndarray]:
        yield from self.prefix_cache.held_slots()
        for row, state in self._rows.items():
            yield self.req_to_token.table[row, state.shared_len : self._allocated[row]]
        for slots in self._draft_slots.values():
            yield slots[~self._accepted[slots]]

    def _allocate(self, count: int) -> np.ndarray:
        missing = count - self.slots.available
        if missing > 0:
            self.counters.evicted += self.prefix_cache.evict(missing)
        return self.slots.allocate(count)

    def _hand_over(self, row: int, state: _Row, tokens: Sequence[int]) -> Node:
        """Move [shared_len, len(tokens)) from the request to the prefix cache.

        [shared_len, held) was there already: the request's copies are freed.
        [held, len(tokens)) are the tree's from here on.
        """
        assert state.shared_len <= len(tokens) <= self._allocated[row]
        slots = self.req_to_token.table[row, : len(tokens)]
        held, node = self.prefix_cache.insert(np.array(tokens, dtype=np.int32), slots)
        self.slots.free(slots[state.shared_len : held])
        return node
