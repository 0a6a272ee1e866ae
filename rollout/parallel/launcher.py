"""Starts a command's ranks on this machine by torchrun, without its traceback when a rank fails.

    python -m rollout.parallel.launcher RANKS MODULE ARGUMENT...

The ranks print their own errors. The exit code is that of the rank that failed first.
"""

from __future__ import annotations

import os
import sys
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

_EXIT_SIGNAL = 128  # plus the signal's number, as shells do


def main() -> int:
    """Run the ranks of `sys.argv` to their end and return the exit code."""
    ranks, *command = sys.argv[1:]
    rank_process = ["-m", "rollout.parallel.rank_process", str(os.getpid()), *command]
    options = ["--standalone", f"--nproc-per-node={ranks}"]
    try:
        with TemporaryDirectory(prefix="specrollout-ranks-") as logs:  # torchrun leaves its own
            run(parse_args([*options, f"--log-dir={logs}", *rank_process]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        return code if code >= 0 else _EXIT_SIGNAL - code  # negative: the signal that killed it
    except SignalException as error:  # sent to this process, which then stopped its ranks
        return _EXIT_SIGNAL + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
