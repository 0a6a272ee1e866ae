"""A stream's order against plain decoding stepped tick by tick, and its ends."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rollout.engine.streaming import StreamOrder, in_order_of_plain_decoding
from rollout.types import FinishReason
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


def test_the_order_is_that_of_plain_decoding_as_soon_as_it_is_certain():
    for seed in range(150):
        run = Run(seed)
        while run.unfinished:
            try:
                run.step()
            except AssertionError as error:
                error.add_note(f"seed {seed}")
                raise
        assert run.released == plain_order(run.ticks, run.max_running), f"seed {seed}"


def test_the_others_keep_their_order_when_some_are_aborted():
    """The order is that of a run in which the aborted ones ended with their next token."""
    for seed in range(60):
        run = Run(seed)
        aborted = set()
        while run.unfinished:
            index = int(run.rng.choice(run.unfinished))
            run.emitted[index] += 1
            if run.rng.random() < 0.2:
                run.order.abort(index, run.emitted[index] - 1)
                run.ticks[index] = run.emitted[index]
                aborted.add(index)
                continue
            if run.emitted[index] == run.ticks[index]:
                run.order.end(index, run.ticks[index])
            run.released += run.order.release()
        run.released += run.order.release()
        expected = [i for i in plain_order(run.ticks, run.max_running) if i not in aborted]
        assert run.released == expected, f"seed {seed}"


def request(request_id, length):
    return SimpleNamespace(request_id=request_id, tokens=[0] * (2 + length), prompt_len=2)


def rollout(request_id, length):
    return SimpleNamespace(
        request_id=request_id, token_ids=[0] * length, finish_reason=FinishReason.STOP
    )


def test_what_was_held_back_comes_before_the_error():
    requests = [request(7, 1), request(8, 5), request(9, 3)]

    def steps():
        yield [rollout(8, 5), rollout(9, 3)]  # 7 may still end before both
        raise RuntimeError("the step failed")

    stream = in_order_of_plain_decoding(requests, 3, steps())
    assert [next(stream).request_id, next(stream).request_id] == [8, 9]
    with pytest.raises(RuntimeError, match="the step failed"):
        next(stream)


def test_whoever_leaves_early_gets_no_more():
    requests = [request(0, 2), request(1, 9)]
    stream = in_order_of_plain_decoding(requests, 2, iter([[rollout(0, 2)], [rollout(1, 9)]]))
    assert next(stream).request_id == 0
    stream.close()
    assert list(stream) == []
