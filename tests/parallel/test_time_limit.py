"""Calls that never end, or at their limit's last moment, and ranks that cannot meet."""

from __future__ import annotations

import threading

import pytest

from rollout.parallel import time_limit
from tests.helpers.hang import HANG_SECONDS


def test_a_call_without_end_is_left_behind_and_its_own_error_raised():
    leave = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.01 seconds"):
        time_limit.within(0.01, lambda: leave.wait(HANG_SECONDS))
    leave.set()

    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        time_limit.within(HANG_SECONDS, fail)
