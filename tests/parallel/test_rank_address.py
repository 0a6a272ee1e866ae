"""A rank's process is looked for by its id and its start."""

from __future__ import annotations

import logging
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue

import pytest
from torch.distributed import HashStore

from rollout.parallel.rank_address import RankAddress, _start_ticks
from rollout.parallel.rank_watch import RankWatch
from tests.helpers.hang import HANG_SECONDS, wait_until


def address_of(process: subprocess.Popen) -> RankAddress:
    here = RankAddress.here()
    return replace(here, pid=process.pid, started=_start_ticks(process.pid))


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


@contextmanager
def watching(others: list[RankAddress], timeout: float) -> Iterator[Queue[str]]:
    """What rank 0, which has made four calls, hears of the others. Rank 1 has made as many."""
    here, lost, store = RankAddress.here(), Queue[str](), HashStore()
    store.set("calls/1", "4")
    watch = RankWatch(
        0, [here, here, *others], store, timeout, calls=lambda: 4, lost=lost.put
    )  # fmt: skip
    yield lost
    watch.close()


def test_a_rank_that_ends_is_noticed_while_this_one_waits() -> None:
    process = subprocess.Popen(["sleep", "600"])
    with process, watching([address_of(process)], HANG_SECONDS) as lost:
        process.kill()
        assert lost.get(timeout=HANG_SECONDS) == "rank 2 has ended or left"


def test_a_rank_that_stops_is_named_at_once_and_given_up_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with subprocess.Popen(["sleep", "600"]) as process, caplog.at_level(logging.WARNING):
        process.send_signal(signal.SIGSTOP)
        with watching([address_of(process)], timeout=0.9) as lost:
            assert lost.get(timeout=HANG_SECONDS) == "rank 2 did not come in 0.9 seconds"
        process.kill()
    named = f"rank 0 waits for rank 2 (process {process.pid}, which is suspended)"
    assert caplog.messages == [named]


def test_a_rank_of_another_host_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        elsewhere = replace(RankAddress.here(), host="another", pid=7)
        with watching([elsewhere], timeout=0.3) as lost:
            assert lost.get(timeout=HANG_SECONDS) == "rank 2 did not come in 0.3 seconds"
