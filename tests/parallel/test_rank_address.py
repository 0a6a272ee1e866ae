"""A rank's process is looked for by its id and its start."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from queue import Queue

from rollout.parallel.rank_address import RankAddress, _start_ticks
from rollout.parallel.rank_watch import RankWatch
from tests.helpers.hang import HANG_SECONDS, wait_until


def test_a_process_is_gone_once_it_has_ended() -> None:
    here = RankAddress.here()
    assert RankAddress.of(here.text) == here
    assert not here.is_gone(here)
    with subprocess.Popen(["sleep", "600"]) as process:
        started = _start_ticks(process.pid)
        assert started is not None
        other = replace(here, pid=process.pid, started=started)
        assert not other.is_gone(here)
        assert replace(other, started=started - 1).is_gone(here), "its id is another's now"
        process.kill()
        wait_until(lambda: other.is_gone(here))  # though nobody has waited for it yet
    assert other.is_gone(here)
    assert not replace(other, host="another").is_gone(here), "nobody can look there"


def test_a_rank_that_ends_is_noticed_while_this_one_waits() -> None:
    here, lost = RankAddress.here(), Queue[int]()
    with subprocess.Popen(["sleep", "600"]) as process:
        other = replace(here, pid=process.pid, started=_start_ticks(process.pid))
        watch = RankWatch(here, {0: here, 3: other}, lost.put)
        process.kill()
        assert lost.get(timeout=HANG_SECONDS) == 3
    watch.close()
