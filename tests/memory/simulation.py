"""A KVCacheManager under random operations, with what each slot holds beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.state_slots import StateSizes
from rollout.memory.window_slots import WindowSizes
from rollout.types import Scheduled
from tests.helpers.requests import int32, make_request
from tests.memory.slot_contents import SlotContents, prefix_keys

CONTEXT = 40


@dataclass
class Row:
    tokens: list[int]
    prompt_len: int
    computed: int  # KV is right for [0, computed)
    version: int  # resets before its admission


class Simulation:
    def __init__(self, seed: int, kind: str) -> None:
        self.rng = np.random.default_rng(seed)
        num_slots, max_rows = 12 + self.below(68), 1 + self.below(5)
        states = windows = None
        if kind == "states":
            states = StateSizes(num_slots=2 + self.below(12), interval=1 + self.below(8))
        if kind == "windows":
            sizes = WindowSizes(num_slots=0, window=1 + self.below(12))
            windows = replace(sizes, num_slots=sizes.span + self.below(30))
        self.memory = KVCacheManager(
            num_slots, max_rows, CONTEXT, kind != "no prefix cache", states, windows=windows
        )
        self.contents = SlotContents(self.memory)
        self.rows: dict[int, Row] = {}

    def play(self, operations: int) -> None:
        """Random operations until the last row is released, checked after each."""
        names, p = ["admit", "step", "release", "evict", "reset"], [0.28, 0.5, 0.14, 0.06, 0.02]
        for name in self.rng.choice(names, p=p, size=operations):
            getattr(self, name)()
            self.check()
        while self.rows:
            self.release()
        self.memory.check_integrity()

    def below(self, bound: int) -> int:
        return int(self.rng.integers(bound))

    def any_row(self) -> int:
        return list(self.rows)[self.below(len(self.rows))]

    def admit(self) -> None:
        if self.memory.req_to_token.available:
            tokens = self.rng.integers(0, 2, size=1 + self.below(14)).tolist()
            cached = self.memory.cached_len(int32(tokens))
            admitted = self.memory.admit(int32(tokens), headroom=self.below(4))
            if admitted:
                row, computed = admitted
                assert computed == cached
                self.rows[row] = Row(tokens, len(tokens), computed, self.contents.version)

    def step(self) -> None:
        """Run and draft for every row; now and then the step fails after its commits."""
        memory, runs = self.memory, []
        for row, state in self.rows.items():
            wanted = min(len(state.tokens), state.computed + 1 + self.below(6))
            end = memory.extend(row, wanted)
            if end > state.computed and len(state.tokens) < CONTEXT - 5:
                runs.append(memory.state_run(row, state.computed, end, state.prompt_len))
        per_row = min(4, memory.node_room(len(runs)) // max(1, len(runs)))
        samples = [run.end == len(self.rows[run.row].tokens) for run in runs]
        counts = [self.below(per_row + 1) if each else 0 for each in samples]
        drafts = memory.reserve_drafts(counts)
        reserved = memory.reserve_states(runs, counts)
        memory.check_integrity()
        entries = []
        for run, slots, states in zip(runs, drafts, reserved, strict=True):
            request = make_request(self.rows[run.row].tokens)
            request.row = run.row
            entries.append(
                Scheduled(request=request, start=run.start, run_len=run.end - run.start,
                          draft_slots=slots, states=states)
            )  # fmt: skip
        fails = self.below(8) == 0
        self.launch(entries, fails)
        paths = [self.run(entry) for entry in entries]
        memory.commit(entries, paths)
        memory.check_integrity()
        memory.end_step(booked=not fails)
        if not fails:
            for entry, path in zip(entries, paths, strict=True):
                self.book(entry, path)

    def launch(self, entries: list[Scheduled], fails: bool) -> None:
        """For subclasses: a step begins, which may fail later."""

    def run(self, entry: Scheduled) -> list[int]:
        """Write what the entry writes; the token of tree node k is k mod 2. Returns its accepted
        path."""
        nodes = self.rng.permutation(len(entry.draft_slots))[: self.below(4)]
        path = np.sort(nodes + 1).tolist()
        keys = prefix_keys(entry.request.tokens[: entry.end] + [node % 2 for node in path])
        self.contents.write(entry, path, keys)
        oldest = self.rows[entry.request.row].version
        self.contents.advance_states(entry, path, keys, oldest)
        return path

    def book(self, entry: Scheduled, path: list[int]) -> None:
        row, state = entry.request.row, self.rows[entry.request.row]
        if entry.samples:
            state.tokens += [node % 2 for node in path] + [self.below(2)]
        state.computed = entry.end + len(path)
        if entry.states is not None and entry.states.checkpoints:
            length = max(entry.states.checkpoints)
        elif entry.states is None and self.below(3) == 0:
            shared = self.memory.shared_len(row)
            length = shared + self.below(state.computed - shared + 1)
        else:
            length = 0
        if length:
            self.memory.share(row, state.tokens[:length])
        self.memory.advance(row, state.computed)

    def release(self) -> None:
        if self.rows:
            row = self.any_row()
            state = self.rows.pop(row)
            self.memory.release(row, state.tokens[: state.computed] if self.below(10) < 7 else [])

    def evict(self) -> None:
        self.memory.prefix_cache.evict(1 + self.below(9))

    def reset(self) -> None:
        self.contents.version += 1
        self.memory.reset()

    def check(self) -> None:
        self.memory.check_integrity()
        usage = self.memory.usage
        assert usage.free + usage.cached + usage.used == self.memory.slots.num_slots
        assert self.memory.shares_prefixes or usage.cached == 0
        for row, state in self.rows.items():
            keys, end = prefix_keys(state.tokens), state.computed
            self.contents.read(row, end, end, keys, state.version)
