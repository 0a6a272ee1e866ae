"""Who counts as hung."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

pytest.importorskip("ray")

from rollout import RolloutEngine
from rollout.cluster.ray.heartbeats import Heartbeats
from rollout.engine.engine_loop import EngineLoop
from tests.cluster.workload import ngram
from tests.helpers.hang import HANG_SECONDS


@dataclass(eq=False)
class FakeReplica:
    busy_seconds: float = 0.0
    is_silent: bool = False
    is_dead: bool = False
    asked: int = 0

    def heartbeat(self) -> Future[float]:
        self.asked += 1
        answer: Future[float] = Future()
        if self.is_dead:
            answer.set_exception(RuntimeError("dead"))
        elif not self.is_silent:
            answer.set_result(self.busy_seconds)
        return answer


def test_silent_and_stuck_ones_are_named_once_and_others_are_left_alone():
    hung: list[tuple[FakeReplica, str]] = []
    heartbeats = Heartbeats(0.2, 100.0, lambda replica, reason: hung.append((replica, reason)))
    well, long, stuck = (
        FakeReplica(),
        FakeReplica(busy_seconds=99.0),
        FakeReplica(busy_seconds=101.0),
    )
    silent, dead, left = (
        FakeReplica(is_silent=True),
        FakeReplica(is_dead=True),
        FakeReplica(is_silent=True),
    )
    for replica in (well, long, stuck, silent, dead, left):
        heartbeats.watch(replica)
    heartbeats.forget(left)
    started = time.monotonic()
    while len(hung) < 2:
        time.sleep(0.01)
    assert time.monotonic() - started > 0.15
    asked = well.asked
    while well.asked < asked + 20:
        time.sleep(0.01)
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
        while loop.busy_seconds:
            time.sleep(0.001)
