"""Ownership of the slots of recurrent states.

A state slot holds one state of all recurrent layers. Every slot except the null slot has exactly
one owner: the free stack; a running request, for its committed state; a step that reserved it; a
running request, for a checkpoint of the step just booked; or the prefix cache's checkpoints.
A request that begins with a checkpoint pins it and owns nothing until its first commit.

A step writes only into reserved slots, so the states it began with survive its failure. Commit
copies nothing: the slot of the last accepted node becomes the request's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout.memory.layer_slots import KVOwners, LayerSlots, StateRun
from rollout.memory.slots import NULL_SLOT, SlotAllocator
from rollout.memory.state_checkpoints import StateCheckpoints
from rollout.types import Scheduled, ScheduledStates

SLOTS_PER_ROW = 2
"""A running request's committed state, and the state its next run ends in. Only as many requests
run as have both, so no step can lack state slots."""

CHECKPOINT_SHARE = 8
"""Draft nodes leave one slot in this many for checkpoints."""


@dataclass(slots=True)
class _Row:
    length: int  # tokens of its committed state
    slot: int  # of that state; the null slot for a state of no tokens
    pinned: int  # KV slot of the checkpoint that `slot` belongs to; null slot: `slot` is the row's
    taken: dict[int, int] = field(default_factory=dict)  # length -> slot of checkpoints to store

    @property
    def owned(self) -> list[int]:
        """Slots of checkpoints to store, and of the committed state unless that is a checkpoint."""
        held = set(self.taken.values())
        if self.owns_state:
            held.add(self.slot)
        return sorted(held)

    @property
    def owns_state(self) -> bool:
        return self.slot != NULL_SLOT and self.pinned == NULL_SLOT


@dataclass(slots=True, frozen=True)
class StateSizes:
    """The number of state slots, and how often prefills store a state."""

    num_slots: int  # at least SLOTS_PER_ROW
    interval: int  # tokens between checkpoints of a prefill


class StateSlots(LayerSlots):
    """Moves state slots between owners. Evicts checkpoints, least recently used first."""

    limits_prefixes = True

    def __init__(self, sizes: StateSizes, num_kv_slots: int) -> None:
        assert sizes.num_slots >= SLOTS_PER_ROW, "nothing could run"
        self._interval = sizes.interval
        self.slots = SlotAllocator(sizes.num_slots)
        self.checkpoints = StateCheckpoints(self.slots, num_kv_slots)
        self.evicted = 0  # checkpoints evicted without their tokens, over the memory's life
        self._rows: dict[int, _Row] = {}
        self._reserved: dict[int, ScheduledStates] = {}  # by a step, by row
        self._committed: dict[int, tuple[int, int]] = {}  # row -> (length, slot), for end_step

    @property
    def obtainable(self) -> int:
        """Slots that are free or evictable, so that no running request has to give any."""
        return self.slots.available + self.checkpoints.evictable

    def usable_len(self, kv_slots: NDArray[np.int32]) -> int:
        """A cached prefix is usable up to the last token whose state was stored."""
        return self.checkpoints.deepest(kv_slots)

    @property
    def fits_another(self) -> bool:
        return len(self._rows) < self.slots.num_slots // SLOTS_PER_ROW

    def node_room(self, num_runs: int) -> int:
        """Slots that draft nodes may take in a step of ``num_runs`` runs."""
        is_alone = num_runs == len(self._rows)
        room = self.obtainable - num_runs if is_alone else self._spare
        return max(0, room - self.slots.num_slots // CHECKPOINT_SHARE)

    @property
    def _spare(self) -> int:
        """Obtainable slots beyond those that running requests, and one more, need to continue.

        A step of some of the requests may use them for nodes and checkpoints.
        """
        max_requests = min(len(self._rows) + 1, self.slots.num_slots // SLOTS_PER_ROW)
        owned = sum(row.owns_state for row in self._rows.values())
        return self.obtainable - (SLOTS_PER_ROW * max_requests - owned - len(self._reserved))

    def open(self, row: int, prefix: NDArray[np.int32], length: int) -> None:
        """Register a request that begins with the checkpoint after its prefix, if it has one."""
        if not len(prefix):
            self._rows[row] = _Row(length=0, slot=NULL_SLOT, pinned=NULL_SLOT)
            return
        last_kv_slot = int(prefix[-1])
        slot = self.checkpoints.at(last_kv_slot)
        assert slot != NULL_SLOT, f"no checkpoint at KV slot {last_kv_slot}"
        self.checkpoints.pin(last_kv_slot)
        self._rows[row] = _Row(length=len(prefix), slot=slot, pinned=last_kv_slot)

    def checkpoint_lengths(self, start: int, end: int, prompt_len: int) -> list[int]:
        """Every ``interval`` tokens of a prefill, and before the prompt's last token, where the
        prompt's other samples begin."""
        first = start // self._interval + 1
        is_prefill = end - start > 1 or start < prompt_len
        lengths = set(range(first * self._interval, end + 1, self._interval) if is_prefill else ())
        if start < prompt_len - 1 <= end:
            lengths.add(prompt_len - 1)
        return sorted(lengths)

    def reserve(self, runs: Sequence[StateRun], counts: Sequence[int]) -> list[ScheduledStates]:
        """Callers must not ask for more nodes than `node_room` in all. Checkpoints get what is
        left, the deepest of each run first."""
        assert not self._reserved, "states of an earlier step are still reserved"
        is_alone = len(runs) == len(self._rows)
        reserved = self._reserved
        run_ends = self._allocate(len(runs)).tolist()
        nodes = self._allocate(sum(counts))
        begin = 0
        for run, run_end, count in zip(runs, run_ends, counts, strict=True):
            row = self._rows[run.row]
            assert row.length == run.start, f"the state has {row.length} tokens, not {run.start}"
            reserved[run.row] = ScheduledStates(
                source=row.slot,
                run_end=run_end,
                nodes=nodes[begin : begin + count],
                checkpoints={},
            )
            begin += count
        for run in runs:
            wanted = [length for length in run.checkpoints if length < run.end]
            room = max(0, self.obtainable if is_alone else self._spare)
            lengths = wanted[max(0, len(wanted) - room) :]
            slots = self._allocate(len(lengths)).tolist()
            checkpoints = dict(zip(lengths, slots, strict=True))
            if run.end in run.checkpoints:
                checkpoints[run.end] = reserved[run.row].run_end
            reserved[run.row].checkpoints = checkpoints
        return [reserved[run.row] for run in runs]

    def commit(self, entries: Sequence[Scheduled], paths: Sequence[Sequence[int]]) -> None:
        """Give each request the state after its last accepted node, or after the run.

        ``paths``: accepted tree nodes, in order. It takes effect when `end_step` books the step.
        """
        for entry, path in zip(entries, paths, strict=True):
            states = entry.states
            assert states is not None
            slot = int(states.nodes[path[-1] - 1]) if path else states.run_end
            self._committed[entry.request.row] = (entry.end + len(path), slot)

    def end_step(self, booked: bool) -> None:
        """Free the step's reserved slots, except committed states and checkpoints if ``booked``."""
        free: list[np.ndarray] = []
        reserved, self._reserved = self._reserved, {}
        for index, states in reserved.items():
            in_use: set[int] = set()
            committed = self._committed.pop(index, None)
            if booked:
                assert committed is not None, f"row {index} was not committed"
                row = self._rows[index]
                free.append(np.array(self._let_go(row), dtype=np.int32))
                row.length, row.slot = committed
                row.taken = states.checkpoints
                in_use = {row.slot, *row.taken.values()}
            scratch = {states.run_end, *states.checkpoints.values(), *states.nodes.tolist()}
            free.append(np.array(sorted(scratch - in_use), dtype=np.int32))
        if free:
            self.slots.free(np.concatenate(free))

    def share(self, row: int, kv_slots: NDArray[np.int32]) -> None:
        """Make checkpoints of the states that the row took in the step just booked.

        ``kv_slots``: those of the prefix cache for the row's first tokens, locked for the row.
        """
        self._store(self._rows[row], kv_slots)

    def close(self, row: int, end: int, kv_slots: NDArray[np.int32]) -> None:
        """Remove a request. Its states become checkpoints as far as ``kv_slots`` reach."""
        state = self._rows.pop(row)
        if state.length == len(kv_slots) > 0:
            state.taken[state.length] = state.slot
        self._store(state, kv_slots)
        self.slots.free(np.array(self._let_go(state), dtype=np.int32))

    def forget(self, kv_slots: NDArray[np.int32]) -> None:
        """Free the checkpoints at these KV slots."""
        self.checkpoints.forget(kv_slots)

    def reset(self) -> None:
        """Free every checkpoint that no running request begins with."""
        self.checkpoints.reset()

    def counters(self) -> dict[str, float]:
        """Gauges for metrics, in state slots."""
        return {
            "states/used": self.slots.num_slots - self.obtainable,
            "states/cached": self.checkpoints.evictable,
            "states/free": self.slots.available,
            "states/evicted": self.evicted,
        }

    def check_integrity(self, kv: KVOwners) -> None:
        """Raise IntegrityError unless every state slot has exactly one owner."""
        pins = [row.pinned for row in self._rows.values() if row.pinned != NULL_SLOT]
        self.checkpoints.check_integrity(pins, kv.cached)
        self.slots.check_integrity(self._held_slots())

    def _held_slots(self) -> Iterator[np.ndarray]:
        yield self.checkpoints.held_slots()
        for row in self._rows.values():
            yield np.array(row.owned, dtype=np.int32)
        for states in self._reserved.values():
            inside = {states.run_end, *states.checkpoints.values()}
            yield np.array([*inside, *states.nodes.tolist()], dtype=np.int32)

    def _store(self, row: _Row, kv_slots: np.ndarray) -> None:
        unused: list[int] = []
        for length, slot in row.taken.items():
            is_own = slot == row.slot
            if length > len(kv_slots):
                unused += [] if is_own else [slot]
                continue
            kv_slot = int(kv_slots[length - 1])
            if is_own and row.pinned != NULL_SLOT:
                self.checkpoints.touch(kv_slot)  # the row began with this checkpoint
            elif self.checkpoints.at(kv_slot) != NULL_SLOT:
                self.checkpoints.touch(kv_slot)
                unused += [] if is_own else [slot]
            else:
                self.checkpoints.put(kv_slot, slot)
                if is_own:
                    self.checkpoints.pin(kv_slot)
                    row.pinned = kv_slot
        row.taken = {}
        self.slots.free(np.array(unused, dtype=np.int32))

    def _let_go(self, row: _Row) -> list[int]:
        """Take the row's state away and return the slots it owned."""
        owned = row.owned
        if row.pinned != NULL_SLOT:
            self.checkpoints.unpin(row.pinned)
        row.slot, row.pinned, row.taken = NULL_SLOT, NULL_SLOT, {}
        return owned

    def _allocate(self, count: int) -> np.ndarray:
        missing = count - self.slots.available
        if missing > 0:
            self.evicted += self.checkpoints.evict(missing)
        return self.slots.allocate(count)
