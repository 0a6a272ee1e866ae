"""KVCacheManager, one rule per test; test_memory_simulation.py checks them all together."""

import pytest

from rollout.errors import IntegrityError
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.prefix_cache import PrefixCache
from rollout.memory.slots import SlotAllocator
from tests.helpers.requests import int32


def admit(memory: KVCacheManager, tokens: list[int]) -> tuple[int, int]:
    admitted = memory.admit(int32(tokens), headroom=0)
    assert admitted is not None
    return admitted


def compute(memory: KVCacheManager, tokens: list[int]) -> int:
    """Admit and give every token a slot, as a prefill would."""
    row, _ = admit(memory, tokens)
    assert memory.extend(row, len(tokens)) == len(tokens)
    return row


def test_the_last_token_is_always_left_to_run():
    memory = KVCacheManager(20, 2, 16, prefix_cache=True)
    memory.release(compute(memory, [5, 6, 7]), [5, 6, 7])
    assert memory.cached_len(int32([5, 6, 7])) == 2
    assert memory.cached_len(int32([5, 6, 7, 8])) == 3
    assert admit(memory, [5, 6, 7]) == (0, 2)
    assert admit(memory, [5]) == (1, 0)
    assert memory.counters.looked_up == 3 + 3 + 1
    assert memory.counters.hit == 2


def test_admission_counts_what_locking_takes_from_the_evictable():
    memory = KVCacheManager(10, 2, 16, prefix_cache=True)
    memory.release(compute(memory, [1, 2, 3, 4, 5, 6]), [1, 2, 3, 4, 5, 6])
    # Ten slots: six cached, four free. The prefix found is no longer there to be evicted.
    tokens = int32([1, 2, 3, 4, 5, 6, 7])
    assert memory.admit(tokens, headroom=4) is None
    memory.check_integrity()
    assert memory.obtainable == 10
    assert memory.admit(tokens, headroom=3) == (0, 6)


def test_extend_evicts_and_stops_where_nothing_is_left():
    memory = KVCacheManager(10, 3, 16, prefix_cache=True)
    memory.release(compute(memory, [1, 2, 3, 4, 5, 6]), [1, 2, 3, 4, 5, 6])
    row = compute(memory, [9] * 4)
    assert memory.slots.available == 0
    assert memory.extend(row, 7) == 7
    assert memory.counters.evicted == 3
    assert memory.cached_len(int32([1, 2, 3, 4, 5, 6])) == 3
    assert memory.extend(row, 14) == 10
    assert memory.extend(row, 14) == 10
    assert memory.usage.used == 10
    memory.check_integrity()


def test_the_prefix_that_was_used_least_recently_goes_first_from_its_end():
    memory = KVCacheManager(12, 2, 16, prefix_cache=True)
    first, second, third = [1, 2, 3], [4, 5, 6], [7, 8, 9]
    for tokens in (first, second):
        memory.release(compute(memory, tokens), tokens)
    row, _ = admit(memory, [*first, 0])
    memory.release(row, [])  # it was read and nothing else
    memory.release(compute(memory, third), third)
    for evicted, held in ((2, [3, 1, 3]), (2, [2, 0, 3]), (3, [0, 0, 2])):
        assert memory.prefix_cache.evict(evicted) == evicted
        found = [memory.cached_len(int32([*tokens, 0])) for tokens in (first, second, third)]
        assert found == held
    memory.check_integrity()


def test_integrity_finds_a_row_that_left_its_prefix():
    memory = KVCacheManager(20, 2, 16, prefix_cache=True)
    memory.release(compute(memory, [1, 2, 3]), [1, 2, 3])
    row, _ = admit(memory, [1, 2, 3])
    memory.req_to_token.table[row, 1] += 1
    with pytest.raises(IntegrityError, match="shared prefix"):
        memory.check_integrity()


def test_integrity_finds_a_wrong_lock_count():
    allocator = SlotAllocator(10)
    cache = PrefixCache(allocator.free)
    _, node = cache.insert(int32([1, 2]), allocator.allocate(2))
    cache.lock(node)
    with pytest.raises(IntegrityError, match="1 locks, 0 holders"):
        cache.check_integrity([])
