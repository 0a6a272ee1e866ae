"""A call that ends at its limit's last moment has its outcome, or its own error."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from rollout.parallel import time_limit
from tests.helpers.hang import HANG_SECONDS


class LateFuture(Future):
    """Its wait ends as out of time just when the outcome has come."""

    def result(self, timeout: float | None = None):
        value = super().result(HANG_SECONDS)
        if timeout is not None:
            raise TimeoutError
        return value


def test_an_outcome_of_the_last_moment_is_the_outcome(monkeypatch):
    monkeypatch.setattr(time_limit, "Future", LateFuture)
    assert time_limit.within(1.0, lambda: 7) == 7


def test_a_call_without_end_is_left_behind():
    leave = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.01 seconds"):
        time_limit.within(0.01, lambda: leave.wait(HANG_SECONDS))
    leave.set()


def test_its_own_error_is_raised():
    def call() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        time_limit.within(HANG_SECONDS, call)
