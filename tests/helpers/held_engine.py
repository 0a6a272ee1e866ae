"""Engines that wait at a given step, so that what comes meanwhile does not race them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from rollout import Rollout
from rollout.engine.engine_loop import EngineLoop
from tests.helpers.hang import HANG_SECONDS


@contextmanager
def held(loop: EngineLoop[Any], *, after: int = 3) -> Iterator[None]:
    """Make a loop wait for a call before each step, once it has made ``after`` more.

    So what a test asks in this context finds the generation under way, however late it comes.
    """
    engine, steps, is_over = loop._engine, count(1), False
    step = engine.step

    def step_when_called() -> list[Rollout]:
        if next(steps) > after:
            with loop._changed:
                assert loop._changed.wait_for(lambda: loop._commands or is_over, HANG_SECONDS)
        rollouts: list[Rollout] = step()
        return rollouts

    engine.step = step_when_called
    try:
        yield
    finally:
        with loop._changed:
            is_over = True
            loop._changed.notify_all()
        del engine.step
