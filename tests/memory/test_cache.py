"""KVCacheManager under random operations, with the KV's content beside every slot."""

from dataclasses import dataclass

import numpy as np
import pytest

from rollout.errors import IntegrityError
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.types import Scheduled
from tests.helpers.requests import int32, make_request


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


def test_extend_gives_back_what_a_failed_step_left():
    memory = KVCacheManager(10, 1, 16, prefix_cache=True)
    row = compute(memory, [1, 2])
    [drafts] = memory.reserve_drafts([3])
    memory.commit_paths([row], [2], [2], drafts[[0, 2]])
    memory.end_step()
    assert memory.slots.available == 6
    assert memory.extend(row, 2) == 2
    assert memory.slots.available == 8
    memory.check_integrity()


def test_rows_that_decode_are_extended_as_one_by_one():
    together, single = (KVCacheManager(20, 3, 16, prefix_cache=False) for _ in range(2))
    lens = [3, 5, 2]
    for memory in (together, single):
        for length in lens:
            compute(memory, list(range(length)))
        memory.extend(1, 4)  # gives a slot back, which is then the first to be taken
        memory.extend(1, 5)
    assert not together.extend_by_one([0, 1, 2], [3, 4, 2])  # row 1 reaches further
    assert together.extend_by_one([0, 1, 2], lens)
    for row, length in enumerate(lens):
        single.extend(row, length + 1)
    assert together.req_to_token.table.tolist() == single.req_to_token.table.tolist()
    assert together.slots.available == single.slots.available == 7
    together.check_integrity()
    together.extend(0, 9)
    assert not together.extend_by_one([0, 1, 2], [9, 6, 3])  # two slots are free
    together.check_integrity()


def test_commit_paths_refuses_a_run_that_ended_elsewhere():
    memory = KVCacheManager(20, 2, 16, prefix_cache=True)
    row = compute(memory, [1, 2])
    [drafts] = memory.reserve_drafts([2])
    with pytest.raises(AssertionError, match=r"runs ended at \[3\], slots at \[2\]"):
        memory.commit_paths([row], [3], [1], drafts[:1])


def test_the_paths_of_a_batch_move_as_one_by_one():
    together, single = (KVCacheManager(60, 4, 16, prefix_cache=False) for _ in range(2))
    paths = [[1, 3], [], [2], [1, 2, 3]]
    for memory in (together, single):
        entries = []
        rows = [compute(memory, list(range(length))) for length in (3, 5, 2, 4)]
        for row, slots in zip(rows, memory.reserve_drafts([3, 2, 4, 3]), strict=True):
            request = make_request(range(memory.extend(row, row + 6)))
            request.row = row
            run = {"start": row + 5, "run_len": 1}
            entries.append(Scheduled(request=request, draft_slots=slots, **run))
        if memory is together:
            memory.commit(entries, paths)
        else:
            for entry, path in zip(entries, paths, strict=True):
                memory.commit([entry], [path])
        memory.check_integrity()
        memory.end_step()
        memory.check_integrity()
        entry = entries[3]
        moved = memory.req_to_token.table[entry.request.row, entry.end : entry.end + 3]
        assert moved.tolist() == entry.draft_slots.tolist()
    assert together.req_to_token.table.tolist() == single.req_to_token.table.tolist()
    assert together.slots.available == single.slots.available


def test_share_moves_duplicates_over_to_the_tree():
    memory = KVCacheManager(20, 2, 16, prefix_cache=True)
    tokens = [1, 2, 3]
    one, other = compute(memory, tokens), compute(memory, tokens)
    memory.share(one, tokens)
    assert memory.slots.available == 14
    memory.share(other, tokens)
    assert memory.slots.available == 17, "the other's copies are freed"
    table = memory.req_to_token.table
    assert table[one, :3].tolist() == table[other, :3].tolist()
    assert memory.usage.cached == 0, "locked by both"
    memory.release(one, [])
    assert memory.usage.cached == 0, "locked by the other"
    memory.release(other, [])
    assert memory.usage.cached == 3
    memory.check_integrity()


def test_without_prefix_cache_nothing_is_kept():
    memory = KVCacheManager(20, 2, 16, prefix_cache=False)
    row = compute(memory, [1, 2, 3])
    memory.share(row, [1, 2, 3])
    memory.release(row, [1, 2, 3])
    assert memory.slots.available == 20
    assert memory.cached_len(int32([1, 2, 3])) == 0


def test_rows_held_through_reset_are_never_shared():
    memory = KVCacheManager(20, 3, 16, prefix_cache=True)
    tokens = [1, 2, 3, 4]
    memory.release(compute(memory, tokens), tokens)
    row, cached_len = admit(memory, tokens)
    memory.extend(row, 4)
    slots = memory.req_to_token.table[row, :4].tolist()
    memory.reset()
    memory.check_integrity()
    assert cached_len == 3
    assert memory.cached_len(int32(tokens)) == 0
    assert memory.req_to_token.table[row, :4].tolist() == slots
    memory.share(row, tokens)
    assert memory.cached_len(int32(tokens)) == 0
    memory.release(row, tokens)
    assert memory.slots.available == 20
    memory.check_integrity()


def test_integrity_finds_a_row_that_left_its_prefix():
    memory = KVCacheManager(20, 2, 16, prefix_cache=True)
    memory.release(compute(memory, [1, 2, 3]), [1, 2, 3])
    row, _ = admit(memory, [1, 2, 3])
    memory.req_to_token.table[row, 1] += 1
    with pytest.raises(IntegrityError, match="shared prefix"):
        memory.check_integrity()


def test_integrity_finds_two_rows_on_one_slot():
    memory = KVCacheManager(20, 2, 16, prefix_cache=False)
    one, other = compute(memory, [1, 2]), compute(memory, [3, 4])
    memory.req_to_token.table[one, 1] = memory.req_to_token.table[other, 0]
    with pytest.raises(IntegrityError, match="two owners"):
        memory.check_integrity()


@dataclass
class Row:
    tokens: list[int]
    computed: int  # KV is right for [0, computed)
    shared: int  # lower bound for the next share()
    version: int  # resets before its admission


class Simulation:
    """Random operations. Each slot remembers (version, prefix) of its last write."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_slots = int(self.rng.integers(12, 80))
        max_rows = int(self.rng.integers(1, 6))
        self.memory = KVCacheManager(self.num_slots, max_rows, 30, prefix_cache=bool(seed % 5))
        self.kv: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.rows: dict[int, Row] = {}
        self.version = 0

    def below(self, bound: int) -> int:
        return int(self.rng.integers(bound))

    def admit(self) -> None:
        if self.memory.req_to_token.available:
            tokens = self.rng.integers(0, 2, size=1 + self.below(14)).tolist()
            admitted = self.memory.admit(int32(tokens), headroom=self.below(4))
            if admitted:
                row, cached = admitted
                self.rows[row] = Row(tokens, cached, cached, self.version)

    def step(self) -> None:
        """Runs and drafts of every row; now and then a step that fails after its commits."""
        ends = {}
        for row, state in self.rows.items():
            wanted = min(len(state.tokens), state.computed + 1 + self.below(5))
            ends[row] = self.memory.extend(row, wanted)
        per_row = min(4, self.memory.obtainable // max(1, len(ends)))
        reserved = self.memory.reserve_drafts([self.below(per_row + 1) for _ in ends])
        self.memory.check_integrity()
        fails = self.below(8) == 0
        for (row, end), slots in zip(ends.items(), reserved, strict=True):
            state = self.rows[row]
            for slot in slots.tolist():
                self.kv[slot] = (self.version, (-1,))
            for position in range(state.computed, end):
                slot = int(self.memory.req_to_token.table[row, position])
                self.kv[slot] = (self.version, tuple(state.tokens[: position + 1]))
            if end < len(state.tokens) or len(state.tokens) + len(slots) >= 30:
                state.computed = state.computed if fails else end
                continue
            accepted = slots[np.sort(self.rng.permutation(len(slots))[: self.below(4)])]
            tokens = state.tokens + self.rng.integers(0, 2, size=len(accepted) + 1).tolist()
            for node, slot in enumerate(accepted.tolist()):
                self.kv[slot] = (self.version, tuple(tokens[: end + node + 1]))
            self.memory.commit_paths([row], [end], [len(accepted)], accepted)
            if not fails:
                state.tokens, state.computed = tokens, end + len(accepted)
        self.memory.check_integrity()
        self.memory.end_step()

    def share(self) -> None:
        if self.rows:
            row, state = self.any_row()
            length = state.shared + self.below(state.computed - state.shared + 1)
            self.memory.share(row, state.tokens[:length])
            state.shared = length

    def release(self) -> None:
        if self.rows:
            row, state = self.any_row()
            del self.rows[row]
            keep = self.rng.random() < 0.7
            self.memory.release(row, state.tokens[: state.computed] if keep else [])

    def reset(self) -> None:
        self.version += 1
        self.memory.reset()

    def any_row(self) -> tuple[int, Row]:
        return list(self.rows.items())[self.below(len(self.rows))]

    def check(self) -> None:
        self.memory.check_integrity()
        usage = self.memory.usage
        assert usage.free + usage.cached + usage.used == self.num_slots
        for row, state in self.rows.items():
            for position in range(state.computed):
                written, prefix = self.kv[int(self.memory.req_to_token.table[row, position])]
                assert prefix == tuple(state.tokens[: position + 1])
                assert written >= state.version, "KV from before a reset reached a later request"


@pytest.mark.parametrize("seed", range(60))
def test_every_row_reads_its_own_prefix_whatever_happens(seed: int):
    simulation = Simulation(seed)
    operations = ["admit", "step", "share", "release", "reset"]
    for name in simulation.rng.choice(operations, p=[0.25, 0.45, 0.15, 0.13, 0.02], size=200):
        getattr(simulation, name)()
        simulation.check()
    while simulation.rows:
        simulation.release()
    simulation.reset()
    assert simulation.memory.slots.available == simulation.num_slots
