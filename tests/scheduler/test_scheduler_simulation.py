"""The scheduler against a worker that knows, slot by slot, which prefix the KV and the recurrent
states there belong to.

The fake model's next token is a function of the whole prefix and the request's seed, so what a
request must emit is known beforehand, whatever runs beside it. Each step the worker writes its KV,
scribbles over draft slots, and then demands that every entry finds its own prefix through
req_to_token.
"""

import functools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.state_slots import SLOTS_PER_ROW, StateSizes
from rollout.memory.window_slots import WindowSizes
from rollout.scheduler import LengthForecast, Scheduler
from rollout.scheduler.step_limits import StepLimits
from rollout.scheduler.waiting import MAX_OVERTAKEN
from rollout.types import Batch, EntryResult, FinishReason, Request, Scheduled, StepResult
from tests.helpers.requests import NoStopCheck, make_request

GARBAGE = 0  # no prefix has this key


@functools.cache
def prefix_key(before: int, token: int) -> int:
    """Names a prefix by the prefix before its last token: one number per position."""
    return ((before ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**61 + 1


@dataclass
class Expected:
    """The tokens that one request must emit, found by running it alone, token by token."""

    tokens: list[int]
    reason: FinishReason
    keys: list[int]  # of every prefix of prompt + tokens


def run_alone(request: Request, vocabulary: int, max_sequence_len: int) -> Expected:
    tokens, keys = list(request.tokens), []
    for token in tokens:
        keys.append(prefix_key(keys[-1] if keys else 1, token))
    while True:
        sample = (keys[-1] ^ request.seed) * 0x2545F4914F6CDD1D % 2**61
        tokens.append(sample // 7 % vocabulary)
        keys.append(prefix_key(keys[-1], tokens[-1]))
        emitted = len(tokens) - request.prompt_len
        if sample % 61 == 0:
            reason = FinishReason.STOP
        elif emitted == request.params.max_new_tokens or len(tokens) == max_sequence_len:
            reason = FinishReason.LENGTH
        else:
            continue
        return Expected(tokens[request.prompt_len :], reason, keys)


class StepFailedError(Exception):
    pass


class FakeWorker:
    def __init__(self, memory: KVCacheManager, rng: np.random.Generator) -> None:
        self.memory = memory
        self.rng = rng
        self.expected: dict[int, Expected] = {}
        self.kv = np.zeros(memory.slots.num_slots + 1, dtype=np.int64)
        self.kv_version = np.zeros(memory.slots.num_slots + 1, dtype=np.int64)
        # Likewise of state slots; what is after no tokens has the key of none.
        num_states = memory.states.slots.num_slots if memory.states else 0
        self.states = np.full(num_states + 1, GARBAGE, dtype=np.int64)
        self.state_version = np.zeros(num_states + 1, dtype=np.int64)
        # And of slots of layers with a window.
        num_windows = memory.windows.sizes.num_slots if memory.windows else 0
        self.window_kv = np.full(num_windows + 1, GARBAGE, dtype=np.int64)
        self.window_version = np.zeros(num_windows + 1, dtype=np.int64)
        self.version = 0
        self.oldest_allowed: dict[int, int] = {}  # version at admission, by request_id
        self.fails = False

    def begin(self, batch: Batch) -> list[EntryResult]:
        self.memory.check_integrity()
        results = [self.result(entry) for entry in batch.entries]
        for entry, result in zip(batch.entries, results, strict=True):
            self.write(entry, result.path)
        for entry, result in zip(batch.entries, results, strict=True):
            self.read(entry)
            if entry.states is not None:
                self.advance_states(entry, result.path)
        return results

    def finish(self, batch: Batch, results: list[EntryResult]) -> StepResult:
        for entry, result in zip(batch.entries, results, strict=True):
            self.memory.commit([entry], [result.path])
            self.read(entry, accepted=len(result.path))
            if entry.states is not None:
                self.read_state(entry, result.path)
        self.memory.check_integrity()
        if self.fails:
            raise StepFailedError
        return StepResult(entries=results, weight_version=self.version)

    def result(self, entry: Scheduled) -> EntryResult:
        if not entry.samples:
            return EntryResult()
        expected, request = self.expected[entry.request.request_id], entry.request
        left = expected.tokens[len(request.token_ids) :]
        drafts = len(entry.draft_slots)
        # Now and then the path outlives the request: the stop was inside it.
        a = int(self.rng.integers(min(drafts, len(left)) + 1))
        path = (np.sort(self.rng.permutation(drafts)[:a]) + 1).tolist()
        emitted = left[: a + 1]
        return EntryResult(
            token_ids=emitted,
            logprobs=[float(token) for token in emitted],
            path=path,
            num_drafted=drafts,
            finish_reason=self.reason(request, expected, len(left) == len(emitted)),
        )

    def reason(self, request: Request, expected: Expected, ends: bool) -> FinishReason | None:
        """The reason to end; None where context or memory is full, which the scheduler must
        notice."""
        full = len(expected.tokens) < request.params.max_new_tokens
        if not ends or (expected.reason is FinishReason.LENGTH and full):
            return None
        return expected.reason

    def write(self, entry: Scheduled, path: list[int]) -> None:
        keys = self.expected[entry.request.request_id].keys
        table = self.memory.req_to_token.table[entry.request.row]
        run, drafts = table[entry.start : entry.end], entry.draft_slots
        assert 0 not in run
        assert 0 not in drafts
        self.kv[drafts] = GARBAGE
        self.kv[run] = keys[entry.start : entry.end]
        on_path = drafts[np.array(path, dtype=int) - 1]
        self.kv[on_path] = keys[entry.end : entry.end + len(path)]
        self.kv_version[run] = self.kv_version[drafts] = self.version
        if self.memory.windows:
            written = np.concatenate([run, drafts])
            slots = self.memory.windows.slot_of[written]
            assert 0 not in slots
            assert len(set(slots.tolist())) == len(slots)
            self.window_kv[slots] = self.kv[written]
            self.window_version[slots] = self.version

    def advance_states(self, entry: Scheduled, path: list[int]) -> None:
        """Read the state the entry begins with, scribble over every slot it may, write its own."""
        request, states = entry.request, entry.states
        keys = self.expected[request.request_id].keys
        if entry.start:
            assert self.states[states.source] == keys[entry.start - 1], "state of another prefix"
            oldest = self.oldest_allowed[request.request_id]
            assert self.state_version[states.source] >= oldest, "state of older weights"
        else:
            assert states.source == 0
        assert len(states.nodes) == len(entry.draft_slots)
        written = [states.run_end, *states.nodes.tolist()]
        inside = {n: slot for n, slot in states.checkpoints.items() if n < entry.end}
        written += inside.values()
        assert len(set(written)) == len(written)
        assert not {0, states.source} & set(written)
        assert states.checkpoints.get(entry.end, states.run_end) == states.run_end
        assert all(entry.start < length for length in states.checkpoints)
        self.states[written] = GARBAGE
        self.state_version[written] = self.version
        self.states[states.run_end] = keys[entry.end - 1]
        for length, slot in inside.items():
            self.states[slot] = keys[length - 1]
        for depth, node in enumerate(path):
            self.states[states.nodes[node - 1]] = keys[entry.end + depth]

    def read_state(self, entry: Scheduled, path: list[int]) -> None:
        """Check that the step's states are there, whatever began while it was under way."""
        keys = self.expected[entry.request.request_id].keys
        last = entry.states.nodes[path[-1] - 1] if path else entry.states.run_end
        assert self.states[last] == keys[entry.end + len(path) - 1]
        for length, slot in entry.states.checkpoints.items():
            assert self.states[slot] == keys[length - 1]

    def read(self, entry: Scheduled, accepted: int = 0) -> None:
        request, end = entry.request, entry.end + accepted
        slots = self.memory.req_to_token.table[request.row, :end]
        keys = self.expected[request.request_id].keys[:end]
        assert self.kv[slots].tolist() == keys, "KV of another prefix"
        oldest = self.kv_version[slots].min()
        assert oldest >= self.oldest_allowed[request.request_id], "KV of older weights"
        if self.memory.windows:
            first = max(0, entry.start + 1 - self.memory.windows.sizes.window)
            seen = self.memory.windows.slot_of[slots[first:]]
            assert self.window_kv[seen].tolist() == keys[first:], "a window over another prefix"
            oldest = self.window_version[seen].min()
            assert oldest >= self.oldest_allowed[request.request_id], "a window over older weights"


@dataclass
class Tracked:
    """The simulation's record of one request."""

    request: Request
    arrival: int
    admitted: bool = False
    overtaken_by: set[int] = field(default_factory=set)


class Simulation:
    """One seed: sizes, arrivals and disturbances drawn from it, and every rule checked per step."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.context = int(rng.integers(4, rng.choice([60, 150])))
        max_running = int(rng.integers(1, 8))
        self.limits = StepLimits(
            max_running=max_running,
            max_step_tokens=max_running + int(rng.integers(0, 40)),
            chunk_len=int(rng.integers(1, 20)),
        )
        tight = rng.random() < 0.75
        slots = int(rng.integers(4, 200)) if tight else 2000
        states = None
        if rng.random() < 0.6:
            states = StateSizes(
                num_slots=SLOTS_PER_ROW + int(rng.integers(rng.choice([1, 10, 60]))),
                interval=int(rng.integers(1, 20)),
            )
        windows, of_windows = None, np.random.default_rng([seed, 2])
        if states is None and of_windows.random() < 0.8:
            sizes = WindowSizes(num_slots=0, window=int(of_windows.integers(1, 30)))
            spare = int(of_windows.integers(of_windows.choice([1, 10, 100])))
            windows = replace(sizes, num_slots=sizes.span + spare)
        self.memory = KVCacheManager(
            slots, max_running, self.context, bool(rng.random() < 0.85), states, windows=windows
        )
        self.max_drafts = int(rng.choice([0, 1, 3, 8, 80]))
        self.lengths = LengthForecast()
        self.scheduler = Scheduler(self.limits, self.memory, lambda: self.max_drafts, self.lengths)
        self.worker = FakeWorker(self.memory, rng)
        self.disturbed = rng.random() < 0.5  # aborts, weight updates, failing steps
        self.to_arrive = int(rng.integers(1, 40))
        self.tracked: dict[int, Tracked] = {}
        self.finished: dict[int, Request] = {}
        self.preambles = [self.tokens(0, 25) for _ in range(2)]
        self.turns = np.random.default_rng([seed, 1])  # whether halves take turns, now and then
        self.overlaps = self.turns.random() < 0.6
        self.halved = self.overlaps
        self.under_way: list[tuple[Batch, list[EntryResult]]] = []
        self.begun_beside = 0  # batches that began while another was under way

    def tokens(self, low: int, high: int) -> list[int]:
        return self.rng.integers(0, 5, size=self.rng.integers(low, high)).tolist()

    def run(self) -> None:
        steps = 0
        while self.to_arrive or self.scheduler.has_unfinished:
            if self.to_arrive and self.rng.random() < 0.4:
                self.arrive()
            if self.disturbed and self.rng.random() < 0.1:
                self.settle()
                self.disturb()
            self.step()
            steps += 1
            assert steps < 20_000, "no end in sight"
        assert not self.under_way
        self.memory.drop_steps()
        self.memory.check_integrity()
        assert self.memory.usage.used == 0, "slots lost"
        self.memory.reset()
        if self.memory.states:
            assert self.memory.states.slots.available == self.memory.states.slots.num_slots
        if self.memory.windows:
            assert self.memory.windows.slots.available == self.memory.windows.sizes.num_slots
        assert self.finished.keys() == self.tracked.keys()

    def arrive(self) -> None:
        """A prompt group, some of them with a preamble in common; what cannot fit is refused."""
        size = min(int(self.rng.integers(1, 6)), self.to_arrive)
        self.to_arrive -= size
        preamble = self.preambles[self.rng.integers(2)] if self.rng.random() < 0.5 else []
        prompt = preamble + self.tokens(1, 30)
        group = int(self.rng.integers(2**63))
        if self.rng.random() < 0.3:  # an earlier epoch
            self.lengths.observe(group, int(self.rng.integers(1, 60)))
        for _ in range(size):
            request = make_request(
                prompt, request_id=len(self.tracked), group=group, stop_check=NoStopCheck(),
                max_new_tokens=int(self.rng.integers(1, 100)), seed=int(self.rng.integers(2**61)),
            )  # fmt: skip
            try:
                self.scheduler.check_fits(request)
            except (InvalidInputError, OutOfMemoryError):
                assert len(prompt) >= min(self.context, self.memory.slots.num_slots)
                continue
            limit = min(self.context, self.memory.slots.num_slots)
            self.worker.expected[request.request_id] = run_alone(request, 5, limit)
            self.tracked[request.request_id] = Tracked(request, arrival=len(self.tracked))
            self.scheduler.add(request)

    def disturb(self) -> None:
        match self.rng.choice(["abort", "retract", "in_place", "fail", "abort_all"]):
            case "abort" if self.tracked:
                request_id = int(self.rng.integers(len(self.tracked)))
                request = self.scheduler.abort(request_id)
                assert (request is None) == (request_id in self.finished)
                self.end([request] if request else [])
            case "retract":
                queue = [*self.scheduler.running, *self.scheduler.waiting]
                self.scheduler.retract_all()
                assert list(self.scheduler.waiting) == queue
                assert not self.scheduler.running
                self.memory.reset()
                assert self.memory.usage.free == self.memory.slots.num_slots
                if self.memory.states:
                    states = self.memory.states.slots
                    assert states.available == states.num_slots
                if self.memory.windows:
                    windows = self.memory.windows.slots
                    assert windows.available == windows.num_slots
                self.worker.version += 1
            case "in_place":
                self.memory.reset()
                self.worker.version += 1
            case "fail":
                self.worker.fails = True
            case "abort_all" if self.rng.random() < 0.2:
                self.end(self.scheduler.abort_all())
                assert not self.scheduler.has_unfinished
        self.memory.check_integrity()

    def step(self) -> None:
        if self.overlaps and self.turns.random() < 0.1:
            self.halved = not self.halved
        while len(self.under_way) < 1 + self.halved and self.begin():
            pass
        self.finish()

    def begin(self) -> bool:
        before = self.scheduler.running
        waiting = self.scheduler.waiting
        under_way = [batch for batch, _ in self.under_way]
        batch = self.scheduler.schedule(under_way, halved=self.halved)
        self.check_batch(batch, before, waiting)
        for request in self.scheduler.running:
            if request not in before:
                self.worker.oldest_allowed[request.request_id] = self.worker.version
        if under_way and not batch.entries:
            return False
        self.begun_beside += bool(under_way)
        self.under_way.append((batch, self.worker.begin(batch)))
        return True

    def finish(self) -> None:
        batch, results = self.under_way.pop(0)
        try:
            result = self.worker.finish(batch, results)
        except StepFailedError:
            self.worker.fails = False
            self.under_way.clear()
            return
        self.end(self.scheduler.commit(batch, result))
        self.memory.check_integrity()
        for request in self.scheduler.running:
            assert 0 <= request.computed_len < len(request.tokens)
            if self.memory.windows and not self.under_way:
                held = self.memory.windows.held(request.row, request.computed_len)
                assert held < self.memory.windows.sizes.span, "more than a window is held"

    def settle(self) -> None:
        while self.under_way:
            self.finish()

    def check_batch(self, batch: Batch, before: tuple, waiting: tuple) -> None:
        busy = {entry.request for under_way, _ in self.under_way for entry in under_way.entries}
        limits, running = self.limits, self.scheduler.running
        requests = [entry.request for entry in batch.entries]
        assert len(set(requests)) == len(requests) <= limits.max_running
        assert set(requests) <= set(running)
        assert len(running) <= limits.max_running
        assert not busy & set(requests)
        assert batch.num_run_tokens <= limits.max_step_tokens
        assert batch.num_run_tokens or busy or not running
        for entry in batch.entries:
            assert entry.start == entry.request.computed_len
            assert 1 <= entry.run_len <= limits.chunk_len
            assert entry.end <= len(entry.request.tokens)
            drafts = len(entry.draft_slots)
            assert entry.draft_slots.dtype == np.int32
            assert drafts <= min(self.max_drafts, 63)
            assert drafts == 0 or entry.samples
        if before and not busy:
            assert before[0] in requests, "the oldest request made no progress"
        mine = [r for r in before if r not in busy]
        if self.halved:
            mine = mine[: (len(before) + 1) // 2]
        assert {r for r in requests if r in before} <= set(mine), "not its turn"
        waits = [r for r in mine if r in running and r not in requests]
        assert not waits or busy or batch.num_run_tokens == limits.max_step_tokens
        decodes = [r for r in mine if r in running and r.extend_len == 1 and r not in waits]
        assert requests[: len(decodes)] == decodes, "a decode did not go first"
        self.check_fairness(before, waiting)

    def check_fairness(self, before: tuple, waiting: tuple) -> None:
        admitted = [r for r in self.scheduler.running if r not in before]
        self.check_longest_first(before, waiting, admitted)
        for request in admitted:
            self.tracked[request.request_id].admitted = True
        if {r.request_id for r in waiting} - {r.request_id for r in admitted}:
            for request in waiting:
                tracked = self.tracked[request.request_id]
                if not tracked.admitted:
                    later = {r.request_id for r in admitted if r.request_id > request.request_id}
                    tracked.overtaken_by |= later

    def check_longest_first(self, before: tuple, waiting: tuple, admitted: list[Request]) -> None:
        """Check requests that were never admitted before; too few are here for anyone's turn to
        come."""
        if self.lengths.is_empty:
            return
        fresh = [r for r in admitted if not self.tracked[r.request_id].admitted]
        expected = [self.expected_remaining(request) for request in fresh]
        assert expected == sorted(expected, reverse=True)
        for request in waiting:
            passed_over = not self.tracked[request.request_id].admitted and request not in fresh
            if fresh and passed_over and self.expected_remaining(request) > expected[-1]:
                prompt = request.tokens[: request.prompt_len]
                others = [r for r in [*before, *waiting] if r is not request]
                assert any(r.tokens[: r.prompt_len] == prompt for r in others)
                assert self.memory.shares_prefixes

    def expected_remaining(self, request: Request) -> float:
        limit = min(self.context, self.memory.slots.num_slots) - len(request.tokens)
        room = min(request.remaining_len, limit)
        return self.lengths.remaining(request.group, request.generated_len, room)

    def end(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.request_id not in self.finished
            self.finished[request.request_id] = request
            assert request.row == -1
            assert request.computed_len <= len(request.tokens)
            expected = self.worker.expected[request.request_id]
            got = request.token_ids
            assert request.logprobs == [float(token) for token in got]
            assert len(request.weight_versions) == len(got)
            assert request.weight_versions == sorted(request.weight_versions)
            if request.finish_reason is FinishReason.ABORT:
                assert got == expected.tokens[: len(got)]
            else:
                assert got == expected.tokens
                assert request.finish_reason is expected.reason


SEEDS = range(80)  # the faults that are hardest to find show in one seed of eight


@functools.cache
def finished(seed: int) -> Simulation:
    simulation = Simulation(seed)
    simulation.run()
    return simulation


def test_everyone_gets_exactly_what_they_would_get_alone():
    for seed in SEEDS:
        try:
            simulation = finished(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        for tracked in simulation.tracked.values():
            most = MAX_OVERTAKEN + simulation.limits.max_running
            assert len(tracked.overtaken_by) <= most, f"seed {seed}: starved"


def test_the_simulation_reaches_what_it_is_for():
    """Else a change of sizes could leave the test above with nothing to check."""
    preemptions = evicted = hits = full = beside = 0
    state_hits = states_evicted = window_hits = windows_evicted = 0
    for seed in SEEDS:
        simulation = finished(seed)
        if simulation.memory.states:
            state_hits += simulation.memory.counters.hit
            states_evicted += simulation.memory.states.evicted
        if simulation.memory.windows:
            window_hits += simulation.memory.counters.hit
            windows_evicted += simulation.memory.windows.evicted
        beside += simulation.begun_beside
        preemptions += sum(each.stats.preemptions for each in simulation.finished.values())
        evicted += simulation.memory.counters.evicted
        hits += simulation.memory.counters.hit
        full += sum(
            len(request.tokens) == simulation.memory.slots.num_slots
            for request in simulation.finished.values()
        )
    assert beside > 300
    assert preemptions > 20
    assert evicted > 1000
    assert hits > 1000
    assert full > 20
    assert state_hits > 300
    assert states_evicted > 300
    assert window_hits > 300
    assert windows_evicted > 300


@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_the_same_calls_give_the_same_batches(seed: int, monkeypatch):
    def batches() -> list:
        simulation, log = Simulation(seed), []
        schedule = simulation.scheduler.schedule

        def logged(under_way, halved) -> Batch:
            batch = schedule(under_way, halved=halved)
            log.append(
                [
                    (
                        e.request.request_id,
                        e.start,
                        e.run_len,
                        e.draft_slots.tolist(),
                        str(e.states),
                    )
                    for e in batch.entries
                ]
            )
            return batch

        monkeypatch.setattr(simulation.scheduler, "schedule", logged)
        simulation.run()
        return log

    assert batches() == batches()
