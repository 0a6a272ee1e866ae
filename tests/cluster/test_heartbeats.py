"""Replicas that hang are found by their heartbeats."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

pytest.importorskip("ray")

from rollout import RolloutEngine
from rollout.cluster.ray.heartbeats import Heartbeats
from rollout.engine.engine_loop import EngineLoop
from tests.cluster.workload import ngram
from tests.helpers.hang import HANG_SECONDS, wait_until


class FakeReplica:
    """Answers heartbeats with ``answer``: seconds, an error, or None for silence."""

    def __init__(self, answer: float | Exception | None = 0.0) -> None:
        self.answer, self.asked = answer, 0

    def heartbeat(self) -> Future[float]:
        self.asked += 1
        future: Future[float] = Future()
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return future


def test_silent_and_stuck_ones_are_named_once_and_others_are_left_alone():
    hung: list[tuple[FakeReplica, str]] = []
    heartbeats = Heartbeats(0.2, 100.0, lambda replica, reason: hung.append((replica, reason)))
    well, long, stuck = FakeReplica(), FakeReplica(99.0), FakeReplica(101.0)
    silent, left, dead = FakeReplica(None), FakeReplica(None), FakeReplica(RuntimeError("dead"))
    for replica in (well, long, stuck, silent, dead, left):
        heartbeats.watch(replica)
    heartbeats.forget(left)
    started = time.monotonic()
    wait_until(lambda: len(hung) >= 2)
    assert time.monotonic() - started > 0.15
    asked = well.asked
    wait_until(lambda: well.asked >= asked + 20)
    heartbeats.close()
    assert dict(hung) == {
        stuck: "101 s in one step or call (stall_seconds)",
        silent: "no sign of life for 0 s (heartbeat_seconds)",
    }
    assert silent.asked == dead.asked == 1


def test_a_loop_says_how_long_it_has_been_at_what_it_does(config):
    begun, opened = threading.Event(), threading.Event()

    def wait(engine: RolloutEngine) -> None:
        begun.set()
        assert opened.wait(HANG_SECONDS)

    with EngineLoop(RolloutEngine.from_config(config, ngram())) as loop:
        waiting = loop.call(wait)
        assert begun.wait(HANG_SECONDS)
        time.sleep(0.05)
        assert loop.busy_seconds >= 0.05
        opened.set()
        waiting.result()
        wait_until(lambda: not loop.busy_seconds)
