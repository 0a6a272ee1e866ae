"""A function's run in a fork of the test's process."""

from __future__ import annotations

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable

from tests.helpers.hang import HANG_SECONDS


def in_fork(function: Callable[[], object]) -> int:
    """The exit status of a fork that runs ``function``: 0, 1 if it raises, -9 if it hangs.

    The fork has none of this process's threads, and runs none of its finalizers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + HANG_SECONDS
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
