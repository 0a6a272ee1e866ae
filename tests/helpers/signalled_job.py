"""Jobs that get a signal when they have written so many rollouts, however fast they are."""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Any

from rollout.offline.output import RolloutOutput
from tests.helpers.forked import run_module


def signal_after(rollouts: int, number: signal.Signals) -> None:
    """Have this process send itself the signal once it has written so many more rollouts."""
    append, written = RolloutOutput.append, count(1)

    def counted(output: RolloutOutput, *row: Any) -> None:
        append(output, *row)
        if next(written) == rollouts:
            os.kill(os.getpid(), number)

    RolloutOutput.append = counted


def run_signalled(folder: str, rollouts: int, number: signal.Signals, *arguments: str) -> None:
    """``specrollout argument ...`` in ``folder``, which gets the signal. Without an end if 0."""
    os.chdir(folder)
    signal_after(rollouts, number)
    run_module("rollout.cli", *arguments)
