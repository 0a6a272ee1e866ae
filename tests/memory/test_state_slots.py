"""Recurrent states' slots: one rule per test, then random operations with contents beside them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


def test_a_chunk_that_ends_where_a_state_is_kept_shares_the_one_it_goes_on_with():
    memory = make_memory()
    tokens = list(range(10))
    row, _ = memory.admit(int32(tokens), headroom=0)
    entry = schedule(memory, row, tokens, 0, 4, prompt_len=10)
    assert entry.states.checkpoints == {4: entry.states.run_end}
    book(memory, entry)
    assert memory.states.checkpoints.at(int(memory.req_to_token.table[row, 3])) != 0
    assert memory.states.obtainable == 11, "pinned"
    following = schedule(memory, row, tokens, 4, 10, prompt_len=10)
    assert following.states.source == entry.states.run_end
    book(memory, following)
    assert memory.states.obtainable == 11, "its own now; the other can be evicted"


@pytest.mark.parametrize(
    ("start", "end", "prompt_len", "lengths"),
    [
        (0, 3, 9, []),
        (3, 5, 9, [4]),
        (5, 9, 9, [8]),  # and it is before the last token
        (0, 1, 1, []),
        (8, 9, 9, []),
        (11, 12, 9, []),  # a decoding step
        (8, 20, 9, [12, 16, 20]),  # computed again
    ],
)
def test_checkpoint_lengths(start, end, prompt_len, lengths):
    assert make_memory().states.checkpoint_lengths(start, end, prompt_len) == lengths


def test_a_sample_begins_with_its_siblings_checkpoint_and_leaves_it_alone():
    memory = make_memory()
    tokens = list(range(6))
    first = prefill(memory, tokens)
    rows = [memory.admit(int32(tokens), headroom=0) for _ in range(2)]
    assert [cached for _, cached in rows] == [5, 5]
    used = memory.states.counters()["states/used"]
    assert used == 2, "the first one's own, and the one both begin with"
    entries = []
    for row, _ in rows[:1]:
        entries.append(schedule(memory, row, tokens, 5, 6, prompt_len=6))
    shared = entries[0].states.source
    book(memory, entries[0])
    second = schedule(memory, rows[1][0], tokens, 5, 6, prompt_len=6)
    assert second.states.source == shared != second.states.run_end
    memory.end_step()
    for row in (first, *(row for row, _ in rows)):
        memory.release(row, [])
        memory.check_integrity()
    assert memory.states.counters()["states/used"] == 0


def test_the_last_accepted_nodes_slot_becomes_the_rows_and_nothing_else_is_kept():
    memory = make_memory()
    tokens = [1, 2, 3]
    row = prefill(memory, tokens)
    memory.extend(row, 3)
    entry = schedule(memory, row, [*tokens, 4], 3, 4, prompt_len=3, nodes=4)
    before = entry.states.source
    nodes = entry.states.nodes.tolist()
    assert len({before, entry.states.run_end, *nodes}) == 6
    free = memory.states.slots.available
    book(memory, entry, path=[2, 3])
    assert memory.states.slots.available == free + 5, "all but the committed one, and the old one"
    following = schedule(memory, row, [*tokens, 4, 5, 6, 7], 6, 7, prompt_len=3)
    assert following.states.source == nodes[2]


def test_a_step_that_is_not_booked_changes_nothing():
    memory = make_memory()
    row = prefill(memory, [1, 2, 3])
    entry = schedule(memory, row, [1, 2, 3, 4], 3, 4, prompt_len=3, nodes=2)
    memory.commit([entry], [[1]])
    memory.check_integrity()
    memory.end_step()
    memory.check_integrity()
    again = schedule(memory, row, [1, 2, 3, 4], 3, 4, prompt_len=3, nodes=2)
    assert again.states.source == entry.states.source
    assert memory.states.counters()["states/used"] == 1 + 3


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


def test_a_checkpoint_goes_with_its_token():
    memory = make_memory()
    memory.release(prefill(memory, list(range(10))), [])
    kept = len(memory.states.checkpoints)
    assert kept == 3
    assert memory.prefix_cache.evict(2) == 2
    memory.check_integrity()
    assert memory.cached_len(int32(range(10))) == 4, "those after eight and nine tokens are gone"


def test_no_more_requests_run_than_have_two_slots():
    memory = make_memory(5, rows=3)
    one = prefill(memory, [1, 2, 3])
    prefill(memory, [4, 5, 6])
    assert not memory.states.fits_another
    assert memory.admit(int32([7, 8]), headroom=0) is None
    memory.release(one, [])
    assert memory.admit(int32([7, 8]), headroom=0) is not None


def test_nodes_leave_room_for_runs_and_checkpoints():
    memory = make_memory(16)
    row, _ = memory.admit(int32(range(10)), headroom=0)
    memory.extend(row, 10)
    run = memory.state_run(row, 0, 10, 10)
    assert memory.node_room(1) == 16 - 1 - 16 // 8
    [states] = memory.reserve_states([run], [memory.node_room(1)])
    assert list(states.checkpoints) == [8, 9], "the deepest, of as many as there is room for"
    memory.check_integrity()


def test_reset_drops_all_but_what_is_begun_with():
    memory = make_memory()
    memory.release(prefill(memory, list(range(10))), list(range(10)))
    row, cached = memory.admit(int32(range(12)), headroom=0)
    assert cached == 10
    memory.reset()
    memory.check_integrity()
    assert memory.cached_len(int32(range(12))) == 0
    assert memory.states.counters()["states/free"] == 11
    entry = schedule(memory, row, list(range(12)), 10, 12, prompt_len=12)
    assert entry.states.source
    assert not entry.states.checkpoints, "of old weights nothing is kept"
    book(memory, entry)
    memory.release(row, list(range(12)))
    memory.check_integrity()
    assert memory.states.slots.available == 12


def test_without_a_prefix_cache_nothing_is_kept():
    memory = make_memory(cache=False)
    memory.release(prefill(memory, list(range(10))), list(range(10)))
    assert memory.states.slots.available == 12


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


class StateMachine(RuleBasedStateMachine):
    """Rows that prefill, decode trees, fail, leave and come back, in a memory too small for them.

    Every state slot remembers the prefix whose state was written there last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = KVCacheManager(70, 4, 40, True, StateSizes(num_slots=11, interval=3))
        self.held: dict[int, tuple[int, ...]] = {0: ()}
        self.rows: dict[int, list] = {}  # row -> [tokens, computed, prompt_len]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def admit(self, tokens) -> None:
        if not self.memory.req_to_token.available:
            return
        cached = self.memory.cached_len(int32(tokens))
        admitted = self.memory.admit(int32(tokens), headroom=20)
        if admitted is not None:
            row, computed = admitted
            assert computed == cached
            self.rows[row] = [tokens, computed, len(tokens)]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), fails=st.booleans(), chunk=st.integers(1, 6))
    def step(self, data, fails, chunk) -> None:
        memory, entries = self.memory, []
        runs, ends = [], {}
        for row, (tokens, computed, prompt_len) in self.rows.items():
            end = memory.extend(row, min(len(tokens), computed + chunk))
            if end > computed and len(tokens) < 30:
                ends[row] = end
                runs.append(memory.state_run(row, computed, end, prompt_len))
        room = memory.node_room(len(runs)) // max(1, len(runs))
        samples = [run.end == len(self.rows[run.row][0]) for run in runs]
        counts = [data.draw(st.integers(0, min(4, room))) if s else 0 for s in samples]
        drafts = memory.reserve_drafts(counts)
        for run, slots, states in zip(
            runs, drafts, memory.reserve_states(runs, counts), strict=True
        ):
            tokens, computed, prompt_len = self.rows[run.row]
            request = make_request(tokens, prompt_len=prompt_len)
            request.row = run.row
            entries.append(
                Scheduled(request=request, start=computed, run_len=run.end - computed,
                          draft_slots=slots, states=states)
            )  # fmt: skip
        memory.check_integrity()
        paths = [self.run(entry, data) for entry in entries]
        for entry, path in zip(entries, paths, strict=True):
            memory.commit([entry], [path])
        memory.end_step(booked=not fails)
        if fails:
            return
        for entry, path in zip(entries, paths, strict=True):
            row, tokens = entry.request.row, entry.request.tokens
            if entry.samples:
                tokens += [node % 2 for node in path] + [data.draw(st.integers(0, 1))]
            self.rows[row][:2] = tokens, entry.end + len(path)
            if entry.states.checkpoints:
                memory.share(row, tokens[: max(entry.states.checkpoints)])

    def run(self, entry, data) -> list[int]:
        """Read what it begins with, write all it may write; node k's token is k mod 2."""
        tokens, states = tuple(entry.request.tokens), entry.states
        assert self.held[states.source] == tokens[: entry.start]
        written = [states.run_end, *states.nodes.tolist(), *states.checkpoints.values()]
        for slot in written:
            self.held[slot] = (-1,)
        self.held[states.run_end] = tokens[: entry.end]
        for length, slot in states.checkpoints.items():
            self.held[slot] = tokens[:length]
        picked = data.draw(st.sets(st.integers(1, max(1, len(states.nodes)))))
        path = sorted(picked) if len(states.nodes) and entry.samples else []
        for depth, node in enumerate(path):
            after = tuple(below % 2 for below in path[: depth + 1])
            self.held[int(states.nodes[node - 1])] = tokens + after
        return path

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        tokens, computed, _ = self.rows.pop(row)
        self.memory.release(row, tokens[:computed] if keep else [])

    @rule(count=st.integers(1, 9))
    def evict_tokens(self, count) -> None:
        self.memory.prefix_cache.evict(count)

    @rule()
    def reset(self) -> None:
        self.memory.reset()

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        self.memory.check_integrity()

    def teardown(self) -> None:
        for row in list(self.rows):
            self.memory.release(row, [])
        self.memory.reset()
        self.memory.check_integrity()
        assert self.memory.states.slots.available == 11


StateMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True
)
test_states_whatever_happens = StateMachine.TestCase
