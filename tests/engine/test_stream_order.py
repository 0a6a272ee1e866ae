"""The order of a stream against plain decoding stepped tick by tick."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.engine.streaming import StreamOrder
from tests.helpers.plain_order import plain_order

FOREVER = 10**6


class Run:
    """Requests of one stream, run in any order and at any pace."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 24))
        self.max_running = int(rng.integers(1, 7))
        longest = int(rng.choice([2, 6, 40]))
        self.ticks = rng.integers(1, longest + 1, count).tolist()
        self.emitted = [0] * count
        self.order = StreamOrder(count, self.max_running, self.emitted.__getitem__)
        self.released: list[int] = []

    @property
    def unfinished(self) -> list[int]:
        return [i for i, ticks in enumerate(self.ticks) if self.emitted[i] < ticks]

    def step(self) -> None:
        """Some run some tokens further; only some ends are followed by a check."""
        rng, left = self.rng, self.unfinished
        for index in rng.permutation(left)[: int(rng.integers(1, self.max_running + 2))].tolist():
            most = self.ticks[index] - self.emitted[index]
            self.emitted[index] += int(rng.integers(0, min(most, 9) + 1))
            if self.emitted[index] == self.ticks[index]:
                self.order.end(index, self.ticks[index])
        if rng.random() < 0.8 or not self.unfinished:
            self.released += self.order.release()
            self.check_tightness()

    def check_tightness(self) -> None:
        """Handed out are those that come first however the unfinished go on, and no fewer."""
        left = self.unfinished
        futures = [
            {u: self.emitted[u] + 1 for u in soon} for soon in ([], left, *([u] for u in left))
        ]
        futures += [
            {u: self.emitted[u] + int(self.rng.integers(1, 30)) for u in left} for _ in range(3)
        ]
        orders = [
            plain_order(
                [
                    future.get(i, FOREVER) if i in left else ticks
                    for i, ticks in enumerate(self.ticks)
                ],
                self.max_running,
            )
            for future in futures
        ]
        certain = []
        for places in zip(*orders, strict=True):
            if len(set(places)) > 1 or places[0] in left:
                break
            certain.append(places[0])
        assert self.released == certain


@pytest.mark.parametrize("block", range(5))
def test_the_order_is_that_of_plain_decoding_as_soon_as_it_is_certain(block: int):
    for seed in range(60 * block, 60 * block + 60):
        run = Run(seed)
        while run.unfinished:
            try:
                run.step()
            except AssertionError as error:
                error.add_note(f"seed {seed}")
                raise
        assert run.released == plain_order(run.ticks, run.max_running), f"seed {seed}"


def test_plain_decoding_itself_is_never_held_back():
    """Each tick every running one emits one token: what ends is handed out in that tick."""
    rng = np.random.default_rng(1)
    ticks, max_running = rng.integers(1, 30, 50).tolist(), 5
    emitted = [0] * len(ticks)
    order = StreamOrder(len(ticks), max_running, emitted.__getitem__)
    waiting, running = list(range(len(ticks))), []
    while waiting or running:
        while waiting and len(running) < max_running:
            running.append(waiting.pop(0))
        for index in running:
            emitted[index] += 1
        ended = sorted(index for index in running if emitted[index] == ticks[index])
        for index in ended:
            order.end(index, ticks[index])
        running = [index for index in running if index not in ended]
        assert order.release() == ended


def test_an_aborted_request_holds_nobody_up():
    emitted = [4, 0, 0]
    order = StreamOrder(3, 1, emitted.__getitem__)
    order.end(1, 2)
    order.end(2, 3)
    assert order.release() == []
    order.abort(0, 4)
    assert order.release() == [1, 2]


@pytest.mark.parametrize("seed", range(60))
def test_the_others_keep_their_order_when_some_are_aborted(seed: int):
    """The order is that of a run in which the aborted ones ended with their next token."""
    run = Run(seed)
    aborted = set()
    while run.unfinished:
        if run.rng.random() < 0.2:
            index = int(run.rng.choice(run.unfinished))
            run.order.abort(index, run.emitted[index])
            run.emitted[index] += 1
            run.ticks[index] = run.emitted[index]
            aborted.add(index)
            continue
        index = int(run.rng.choice(run.unfinished))
        run.emitted[index] += 1
        if run.emitted[index] == run.ticks[index]:
            run.order.end(index, run.ticks[index])
        run.released += run.order.release()
    run.released += run.order.release()
    expected = [i for i in plain_order(run.ticks, run.max_running) if i not in aborted]
    assert run.released == expected


def test_a_check_looks_at_running_requests_alone():
    """Four thousand requests, a straggler first, and one check per token."""
    rng = np.random.default_rng(2)
    count, max_running, looks = 4096, 32, 0
    ticks = rng.integers(1, 20, count).tolist()
    ticks[0] = 5000
    emitted = [0] * count

    def look(index: int) -> int:
        nonlocal looks
        looks += 1
        return emitted[index]

    order = StreamOrder(count, max_running, look)
    released: list[int] = []
    for index in [*range(1, count), 0]:
        emitted[index] = ticks[index]
        order.end(index, ticks[index])
        before = looks
        released += order.release()
        assert looks - before <= 2 * max_running
    assert released == plain_order(ticks, max_running)
