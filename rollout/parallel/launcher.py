"""Runs a command's ranks on this machine, each a process, until all have ended.

    python -m rollout.parallel.launcher RANKS MODULE ARGUMENT...

Signals are passed to rank 0 alone, which ends the others when it has finished, however long that
takes. A terminal's Ctrl-C reaches this process alone, since ranks have sessions of their
own. When a rank fails the others are ended, and the exit code is the failed one's. Ranks print
their own errors.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from rollout.parallel.model_ranks import host_store, launch_variables

_EXIT_SIGNAL = 128  # plus the signal's number, as shells do
_POLL_SECONDS = 0.05
_LAST_SECONDS = 30.0  # that ranks have to end once one has


def main() -> int:
    """Run the ranks of `sys.argv` to their end and return the exit code."""
    size, *command = sys.argv[1:]
    store = host_store()
    ranks = [start_rank(rank, int(size), store.port, command) for rank in range(int(size))]

    def pass_on(number: int, frame: FrameType | None) -> None:
        ranks[0].send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)  # under nohup SIGHUP is ignored, by ranks too
    while all(process.poll() is None for process in ranks):
        time.sleep(_POLL_SECONDS)
    failed = _failed(ranks)
    for rank, code in failed.items():
        if code < 0:
            print(f"error: {failure(rank, int(size), code)}", file=sys.stderr, flush=True)
    end_ranks(ranks, terminate=bool(failed))
    code = min((failed or _failed(ranks)).values(), default=0)
    return code if code >= 0 else _EXIT_SIGNAL - code


def start_rank(
    rank: int, size: int, port: int, command: Sequence[str], *, stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a rank that ends with this process. ``command``: a module and its arguments."""
    rank_process = [sys.executable, "-m", "rollout.parallel.rank_process", str(os.getpid())]
    variables = launch_variables(rank, size, port, rank)
    if size > 1:  # they share the processors
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return subprocess.Popen(
        [*rank_process, *command], env=os.environ | variables, start_new_session=True, stdin=stdin
    )


def _failed(ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """The exit codes of those that failed, by rank; negative: the signal that killed it."""
    codes = {rank: process.poll() for rank, process in enumerate(ranks)}
    return {rank: code for rank, code in codes.items() if code}


def failure(rank: int, size: int, code: int) -> str:
    """A line that says how a rank's process has ended. ``code``: negative for a signal."""
    if code < 0:
        return f"rank {rank} of {size} was killed by {signal.Signals(-code).name}"
    return f"rank {rank} of {size} has ended with exit code {code}"


def end_ranks(ranks: Sequence[subprocess.Popen[bytes]], *, terminate: bool) -> None:
    """Wait for all to end, and kill what takes too long."""
    if terminate:
        for process in ranks:
            process.terminate()  # does nothing to one that has ended
    deadline = time.monotonic() + _LAST_SECONDS
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
