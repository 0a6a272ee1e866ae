"""A rank's process, started by `rollout.parallel.launcher`; it ends with its launcher.

    python -m rollout.parallel.rank_process LAUNCHER_PID MODULE ARGUMENT...

A killed launcher cannot stop its ranks, and surviving ranks would keep the output locked when the
same command is started again.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1


def main() -> None:
    """Run the module of `sys.argv` as `__main__`, tied to the launcher's life (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    launcher, *sys.argv = sys.argv[1:]
    if os.getppid() != int(launcher):  # it died before the signal was asked for
        sys.exit("the launcher of this rank has ended")
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
