"""The one limit of tests that wait: it ends what hangs and decides no result."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_SECONDS = 900.0
"""Ten times what the longest wait takes on a slow machine that does other work as well."""


def _pause() -> None:
    time.sleep(0.005)


def wait_until(reached: Callable[[], object], meanwhile: Callable[[], object] = _pause) -> None:
    """Look whether it is reached, and call ``meanwhile``, again and again."""
    deadline = time.monotonic() + HANG_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "it was never reached"
        meanwhile()
