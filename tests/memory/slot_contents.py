"""Contents of a KVCacheManager's slots: the prefix and the version of each last write."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.types import Scheduled

GARBAGE = 0  # no prefix has this key


@functools.cache
def prefix_key(before: int, token: int) -> int:
    """Names a prefix by the prefix before its last token: one number per position."""
    return ((before ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**61 + 1


def prefix_keys(tokens: Sequence[int]) -> list[int]:
    """The keys of a text's prefixes, of one token at first."""
    keys: list[int] = []
    for token in tokens:
        keys.append(prefix_key(keys[-1] if keys else 1, token))
    return keys


class Pool:
    """Keys of prefixes by slot, and the version in which each was written."""

    def __init__(self, num_slots: int) -> None:
        self.keys = np.full(num_slots + 1, GARBAGE, dtype=np.int64)
        self.versions = np.zeros(num_slots + 1, dtype=np.int64)

    def write(self, slots: Sequence[int], keys: int | Sequence[int], version: int) -> None:
        assert 0 not in slots
        self.keys[slots] = keys
        self.versions[slots] = version

    def read(self, slots: Sequence[int], keys: list[int], oldest: int) -> None:
        """Check that the slots hold these prefixes, of this version or a later one."""
        assert self.keys[slots].tolist() == keys, "another prefix"
        assert not len(slots) or self.versions[slots].min() >= oldest, "older weights"


class SlotContents:
    """Plays the model: writes the slots of entries, and checks what their rows would read.

    ``keys``: of a request's prefixes, accepted drafts included. ``oldest``: the version in which it
    was admitted.
    """

    def __init__(self, memory: KVCacheManager) -> None:
        self.memory = memory
        self.version = 0
        self.kv = Pool(memory.slots.num_slots)
        self.states = Pool(memory.states.slots.num_slots if memory.states else 0)
        self.windows = Pool(memory.windows.sizes.num_slots if memory.windows else 0)

    def write(self, entry: Scheduled, path: list[int], keys: list[int]) -> None:
        """Write the entry's KV, and garbage to the nodes that are not on its path."""
        run = self.memory.req_to_token.table[entry.request.row, entry.start : entry.end]
        drafts = entry.draft_slots
        on_path = drafts[np.array(path, dtype=int) - 1]
        self.kv.write(drafts, GARBAGE, self.version)
        self.kv.write(run, keys[entry.start : entry.end], self.version)
        self.kv.write(on_path, keys[entry.end : entry.end + len(path)], self.version)
        if self.memory.windows:
            written = np.concatenate([run, drafts])
            slots = self.memory.windows.slot_of[written]
            assert len(set(slots.tolist())) == len(slots)
            self.windows.write(slots, self.kv.keys[written], self.version)

    def read(self, row: int, start: int, end: int, keys: list[int], oldest: int) -> None:
        """Check what a run that begins at ``start`` reads before ``end``."""
        slots = self.memory.req_to_token.table[row, :end]
        self.kv.read(slots, keys[:end], oldest)
        if self.memory.windows:
            first = max(0, start + 1 - self.memory.windows.sizes.window)
            self.windows.read(self.memory.windows.slot_of[slots[first:]], keys[first:end], oldest)

    def advance_states(
        self, entry: Scheduled, path: list[int], keys: list[int], oldest: int
    ) -> None:
        """Read the state the entry begins with, scribble over every slot it may, write its own."""
        if (states := entry.states) is None:
            return
        assert (states.source == 0) == (entry.start == 0)
        if entry.start:
            self.states.read([states.source], keys[entry.start - 1 : entry.start], oldest)
        assert len(states.nodes) == len(entry.draft_slots)
        inside = {n: slot for n, slot in states.checkpoints.items() if n < entry.end}
        written = [states.run_end, *states.nodes.tolist(), *inside.values()]
        assert len(set(written)) == len(written)
        assert states.source not in written
        assert states.checkpoints.get(entry.end, states.run_end) == states.run_end
        assert all(entry.start < length for length in states.checkpoints)
        self.states.write(written, GARBAGE, self.version)
        self.states.write([states.run_end], keys[entry.end - 1], self.version)
        for length, slot in inside.items():
            self.states.write([slot], keys[length - 1], self.version)
        for depth, node in enumerate(path):
            self.states.write([states.nodes[node - 1]], keys[entry.end + depth], self.version)

    def read_states(self, entry: Scheduled, path: list[int], keys: list[int]) -> None:
        """Check that the step's states are there, whatever began while it was under way."""
        if (states := entry.states) is None:
            return
        last = states.nodes[path[-1] - 1] if path else states.run_end
        for length, slot in ((entry.end + len(path), last), *states.checkpoints.items()):
            self.states.read([slot], keys[length - 1 : length], 0)

    def check_empty(self) -> None:
        """Check that nobody has a slot, and nothing is cached."""
        layers = self.memory.states or self.memory.windows
        for pool in (self.memory.slots, *([layers.slots] if layers else [])):
            assert pool.available == pool.num_slots
