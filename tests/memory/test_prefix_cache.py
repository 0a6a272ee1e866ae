"""The radix tree against a dictionary of prefixes, one token at a time."""

from collections import Counter

import numpy as np
import pytest

from rollout.errors import IntegrityError
from rollout.memory.prefix_cache import Node, PrefixCache
from rollout.memory.slots import SlotAllocator
from tests.helpers.requests import int32

Prefix = tuple[int, ...]


class Harness:
    """Drives a PrefixCache and says, from a dictionary, what it must answer."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.allocator = SlotAllocator(num_slots)
        self.cache = PrefixCache(self.allocator.free)
        self.slot_of: dict[Prefix, int] = {}
        self.last_used: dict[Prefix, int] = {}
        self.clock = 0
        self.holders: list[tuple[Prefix, Node, list[int], bool]] = []  # last: still in the tree

    def prefixes(self, tokens: Prefix) -> list[Prefix]:
        return [tokens[:i] for i in range(1, len(tokens) + 1)]

    def locked(self) -> Counter[Prefix]:
        return Counter(
            p for prefix, *_, in_tree in self.holders if in_tree for p in self.prefixes(prefix)
        )

    def touch(self, tokens: Prefix) -> None:
        self.clock += 1
        self.last_used.update(dict.fromkeys(self.prefixes(tokens), self.clock))

    def longest(self, tokens: Prefix) -> Prefix:
        return max((p for p in self.prefixes(tokens) if p in self.slot_of), key=len, default=())

    def insert(self, tokens: Prefix, lock: bool = False) -> None:
        count = min(len(tokens), self.allocator.available)
        tokens = tokens[:count]
        slots = self.allocator.allocate(count)
        held, node = self.cache.insert(int32(tokens), slots)
        assert held == len(self.longest(tokens))
        self.allocator.free(slots[:held])
        for prefix, slot in zip(self.prefixes(tokens), slots.tolist(), strict=True):
            self.slot_of.setdefault(prefix, slot)
        self.touch(tokens)
        if lock:
            self.cache.lock(node)
            path = [self.slot_of[p] for p in self.prefixes(tokens)]
            self.holders.append((tokens, node, path, True))

    def match(self, tokens: Prefix, lock: bool) -> None:
        found = self.longest(tokens)
        assert self.cache.match_len(int32(tokens)) == len(found)
        slots, node = self.cache.match(int32(tokens))
        assert slots.dtype == np.int32
        assert slots.tolist() == [self.slot_of[p] for p in self.prefixes(found)]
        self.touch(found)
        if lock:
            self.cache.lock(node)
            self.holders.append((found, node, slots.tolist(), True))

    def unlock(self, which: int) -> None:
        _, node, *_ = self.holders.pop(which)
        self.cache.unlock(node)

    def evict(self, count: int) -> None:
        locked, evicted = self.locked(), []
        while len(evicted) < count:
            parents = {p[:-1] for p in self.slot_of}
            leaves = [p for p in self.slot_of if p not in parents and not locked[p]]
            if not leaves:
                break
            oldest = min(leaves, key=self.last_used.__getitem__)
            evicted.append(self.slot_of.pop(oldest))
        before = self.allocator.available
        assert self.cache.evict(count) == len(evicted)
        freed = self.allocator.available - before
        assert freed == len(evicted)
        assert sorted(self.allocator.allocate(freed).tolist()) == sorted(evicted)
        self.allocator.free(int32(evicted))

    def reset(self) -> None:
        self.cache.reset()
        self.slot_of.clear()
        self.holders = [(prefix, node, slots, False) for prefix, node, slots, _ in self.holders]

    def check(self) -> None:
        self.cache.check_integrity([node for _, node, *_ in self.holders])
        self.allocator.check_integrity(self.cache.held_slots())
        locked = self.locked()
        assert self.cache.evictable == sum(not locked[p] for p in self.slot_of)
        for _, node, slots, _ in self.holders:
            assert self.cache.path_slots(node).tolist() == slots, "a locked prefix moved"


@pytest.mark.parametrize("seed", range(3))
def test_against_dictionary(seed: int):
    rng = np.random.default_rng(seed)
    harness = Harness(150)
    names = ["insert", "insert and lock", "match", "lock", "unlock", "evict", "reset"]
    for name in rng.choice(names, p=[0.25, 0.05, 0.2, 0.1, 0.2, 0.19, 0.01], size=1000):
        tokens = tuple(rng.integers(0, 2, size=rng.integers(0, 12)).tolist())
        match name:
            case "insert" | "insert and lock":
                harness.insert(tokens, lock=name == "insert and lock")
            case "match" | "lock":
                harness.match(tokens, lock=name == "lock")
            case "unlock" if harness.holders:
                harness.unlock(int(rng.integers(len(harness.holders))))
            case "evict":
                harness.evict(int(rng.integers(20)))
            case "reset":
                harness.reset()
        harness.check()


def test_integrity_finds_a_wrong_lock_count():
    allocator = SlotAllocator(10)
    cache = PrefixCache(allocator.free)
    _, node = cache.insert(int32([1, 2]), allocator.allocate(2))
    cache.lock(node)
    with pytest.raises(IntegrityError, match="1 locks, 0 holders"):
        cache.check_integrity([])
