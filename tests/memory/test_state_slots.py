"""Slots of recurrent states, one rule per test; test_memory_simulation.py checks all together."""

from __future__ import annotations

import pytest

from rollout.errors import IntegrityError
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.state_slots import StateSizes
from rollout.types import Scheduled
from tests.helpers.requests import int32, make_request


def make_memory(states=12, *, interval=4, rows=3, cache=True) -> KVCacheManager:
    return KVCacheManager(60, rows, 40, cache, StateSizes(num_slots=states, interval=interval))


def schedule(memory, row, tokens, start, end, prompt_len, nodes=0) -> Scheduled:
    """One run of one row, as the scheduler plans it."""
    assert memory.extend(row, end) == end
    run = memory.state_run(row, start, end, prompt_len)
    [drafts] = memory.reserve_drafts([nodes])
    [states] = memory.reserve_states([run], [nodes])
    request = make_request(tokens, prompt_len=prompt_len)
    request.row = row
    return Scheduled(
        request=request, start=start, run_len=end - start, draft_slots=drafts, states=states
    )


def book(memory, entry, path=()) -> None:
    memory.commit([entry], [list(path)])
    memory.end_step(booked=True)
    if entry.states.checkpoints:
        length = max(entry.states.checkpoints)
        memory.share(entry.request.row, entry.request.tokens[:length])
    memory.check_integrity()


def prefill(memory, tokens, start=0) -> int:
    admitted = memory.admit(int32(tokens), headroom=0)
    assert admitted is not None
    row, cached = admitted
    assert cached == start
    book(memory, schedule(memory, row, tokens, start, len(tokens), len(tokens)))
    return row


def test_states_are_kept_at_intervals_and_before_the_last_token():
    memory = make_memory()
    row, _ = memory.admit(int32(range(10)), headroom=0)
    entry = schedule(memory, row, list(range(10)), 0, 10, prompt_len=10)
    assert list(entry.states.checkpoints) == [4, 8, 9]
    assert entry.states.source == 0
    assert len({entry.states.run_end, *entry.states.checkpoints.values()}) == 4
    book(memory, entry)
    assert memory.states.counters()["states/used"] == 1
    assert memory.cached_len(int32(range(10))) == 9
    assert memory.cached_len(int32([*range(7), 50, 51])) == 4, "seven tokens are cached, four count"
    assert memory.cached_len(int32([50, 51])) == 0


def test_checkpoint_lengths():
    for start, end, prompt_len, lengths in (
        (0, 3, 9, []),
        (3, 5, 9, [4]),
        (5, 9, 9, [8]),  # and it is before the last token
        (0, 1, 1, []),
        (8, 9, 9, []),
        (11, 12, 9, []),  # a decoding step
        (8, 20, 9, [12, 16, 20]),  # computed again
    ):
        found = make_memory().states.checkpoint_lengths(start, end, prompt_len)
        assert found == lengths, (start, end)


def test_a_request_that_leaves_leaves_its_state():
    memory = make_memory()
    row = prefill(memory, [1, 2, 3])
    memory.release(row, [1, 2, 3])
    memory.check_integrity()
    assert memory.cached_len(int32([1, 2, 3, 4])) == 3
    assert memory.states.counters()["states/used"] == 0
    assert prefill(memory, [1, 2, 3, 4], start=3) >= 0


def test_checkpoints_go_alone_least_recently_used_first():
    memory = make_memory(8, interval=100, rows=4)
    for first in (10, 20, 30):
        memory.release(prefill(memory, [first, first + 1]), [])
    assert memory.states.slots.available == 5
    assert memory.cached_len(int32([10, 11])) == 1
    memory.release(memory.admit(int32([10, 11]), headroom=0)[0], [])  # used again
    for first in (40, 50):
        memory.release(prefill(memory, [first, first + 1]), [first, first + 1])
    prefill(memory, [60, 61])
    assert memory.states.evicted == 1
    assert memory.cached_len(int32([20, 21])) == 0, "the oldest, though its token is cached"
    assert memory.cached_len(int32([10, 11])) == 1
    assert memory.prefix_cache.match_len(int32([20])) == 1


def test_nodes_leave_room_for_runs_and_checkpoints():
    memory = make_memory(16)
    row, _ = memory.admit(int32(range(10)), headroom=0)
    memory.extend(row, 10)
    run = memory.state_run(row, 0, 10, 10)
    assert memory.node_room(1) == 16 - 1 - 16 // 8
    [states] = memory.reserve_states([run], [memory.node_room(1)])
    assert list(states.checkpoints) == [8, 9], "the deepest, of as many as there is room for"
    memory.check_integrity()


def test_integrity_finds_a_slot_with_two_owners_and_a_state_without_its_token():
    memory = make_memory()
    row = prefill(memory, [1, 2, 3])
    memory.states._rows[row].slot = int(memory.states.checkpoints.held_slots()[0])
    with pytest.raises(IntegrityError, match="two owners"):
        memory.check_integrity()
    memory = make_memory()
    memory.states.checkpoints.put(7, int(memory.states.slots.allocate(1)[0]))
    with pytest.raises(IntegrityError, match="outlived its token"):
        memory.check_integrity()
