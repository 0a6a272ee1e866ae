"""Slots of layers with a window: held while a window sees their token, then kept or given back."""

import numpy as np
import pytest

from rollout.errors import IntegrityError
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.window_slots import WindowSizes
from tests.helpers.requests import int32


def memory_of(window_slots: int, window: int, *, kv_slots: int = 200, prefix_cache: bool = True):
    sizes = WindowSizes(num_slots=window_slots, window=window)
    return KVCacheManager(kv_slots, 4, 160, prefix_cache, windows=sizes)


def run(memory: KVCacheManager, tokens: list[int], chunk: int = 10) -> tuple[int, int]:
    """Admit and compute all tokens, chunk by chunk. Returns the row and its cached length."""
    admitted = memory.admit(int32(tokens), headroom=0)
    assert admitted is not None
    row, cached = admitted
    computed = cached
    while computed < len(tokens):
        computed = memory.extend(row, min(computed + chunk, len(tokens)))
        memory.advance(row, computed)
        memory.check_integrity()
    return row, cached


def test_a_long_request_holds_little_more_than_its_window() -> None:
    sizes = WindowSizes(num_slots=2000, window=512)
    memory = KVCacheManager(5000, 2, 4096, True, windows=sizes)
    row, _ = memory.admit(np.arange(3000, dtype=np.int32), headroom=0)
    held = []
    for end in [*range(256, 3000, 256), *range(3000, 4097)]:
        assert memory.extend(row, end) == end
        memory.advance(row, end)
        held.append(memory.windows.held(row, end))
    assert memory.windows.counters()["windows/used"] == held[-1]
    assert max(held) < 1.3 * 512
    assert min(held[8:]) >= 512
    memory.check_integrity()


def test_a_cached_prefix_is_usable_before_which_a_window_is_whole() -> None:
    rng = np.random.default_rng(0)
    for window in (1, 2, 5, 30) * 50:
        memory = memory_of(60, window)
        slots = rng.permutation(60)[:40].astype(np.int32) + 1
        memory.windows.slot_of[slots] = has = rng.random(40) < 0.8
        usable = [length for length in range(41) if has[max(0, length - window + 1) : length].all()]
        assert memory.windows.usable_len(slots) == usable[-1]


def test_samples_of_a_prompt_find_its_last_window() -> None:
    memory = memory_of(80, 8)
    prompt = list(range(50))
    row, _ = run(memory, prompt)
    memory.share(row, prompt)
    memory.check_integrity()
    before = memory.windows.counters()["windows/used"]
    other, cached = memory.admit(int32(prompt), headroom=0)
    assert cached == 49
    assert memory.windows.counters()["windows/used"] == before, "they share it"
    memory.release(row, prompt)
    memory.release(other, prompt[:49])
    memory.check_integrity()
    assert memory.windows.counters()["windows/used"] == 0
    assert memory.cached_len(int32([*prompt, 1])) == 50
    assert memory.cached_len(int32(prompt[:30])) == 0, "of an earlier end no window is there"


def test_the_window_that_was_let_go_first_is_evicted_first() -> None:
    memory = memory_of(30, 8)
    for first in (0, 50, 100):
        row, _ = run(memory, list(range(first, first + 20)))
        memory.release(row, list(range(first, first + 20)))
    cached = [memory.cached_len(int32([*range(first, first + 20), 1])) for first in (0, 50, 100)]
    assert cached == [0, 20, 20]
    assert memory.counters.evicted == 0
    assert memory.windows.evicted > 0


def test_a_chunk_is_cut_to_what_there_is_and_a_decode_has_one() -> None:
    memory = memory_of(27, 16)
    row, _ = memory.admit(int32(range(100)), headroom=0)
    assert memory.extend(row, 100) == 26
    memory.advance(row, 26)
    assert memory.windows.held(row, 26) == 16
    assert memory.extend(row, 100) == 36
    assert memory.extend_by_one([row], [36])
    assert not memory.extend_by_one([row], [37])
    memory.check_integrity()


def test_a_request_is_admitted_if_its_window_fits_beside_the_others() -> None:
    memory = memory_of(50, 16)
    first, _ = memory.admit(int32(range(100)), headroom=0)
    assert memory.admit(int32(range(100, 200)), headroom=0) is not None
    assert memory.admit(int32(range(100)), headroom=0) is None
    memory.release(first, [])
    assert memory.admit(int32(range(100)), headroom=0) is not None
    memory.check_integrity()


def test_integrity_finds_a_slot_that_is_lost_and_a_hold_too_many() -> None:
    memory = memory_of(60, 8)
    row, _ = run(memory, list(range(20)))
    last = memory.req_to_token.table[row, 19]
    slot = int(memory.windows.slot_of[last])
    memory.windows.slot_of[last] = 0
    with pytest.raises(IntegrityError, match="window slots: a held token has none"):
        memory.check_integrity()
    memory.windows.slot_of[last] = slot
    memory.windows._holds[last] += 1
    with pytest.raises(IntegrityError, match="holds are counted wrongly"):
        memory.check_integrity()


def test_a_request_whose_length_is_known_is_admitted_with_slots_to_reach_it() -> None:
    memory = memory_of(120, 40, kv_slots=600, prefix_cache=False)
    for first in (0, 1000):
        run(memory, list(range(first, first + 100)))
    assert memory.windows.obtainable < memory.windows.sizes.span
    assert memory.admit(int32(range(5)), headroom=0, final_len=100) is None
    row, _ = memory.admit(int32(range(5)), headroom=0)
    memory.release(row, [])
    assert memory.run_room == memory.windows.obtainable - 3
    assert memory.node_slots == 120
    assert memory_of(60, 8, kv_slots=30).node_slots == 30
    memory.check_integrity()
