"""A sender that is stopped: nobody waits for it for ever."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from rollout.errors import WeightUpdateError
from rollout.parallel import time_limit
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.ports import free_port
from tests.helpers.weight_peer import peer, send
from tests.weights.conftest import assert_serves


def stopped(process, monkeypatch):
    """Wait until it is; from then on an answer of its store need not be waited for."""
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    monkeypatch.setattr(time_limit, "ANSWER_SECONDS", 0.5)


def test_a_group_whose_sender_is_stopped(engine, policies, monkeypatch):
    """Its connections stay open, and its store answers nobody."""
    port = free_port()
    with (
        peer(send, policies[1].folder, port, after=9, by=signal.SIGSTOP) as sender,
        ThreadPoolExecutor(1) as threads,
    ):
        engine.init_weights_update_group("127.0.0.1", port, 1, 2, "weights", timeout=HANG_SECONDS)
        call = sender.hear("arguments")
        seen = threads.submit(stopped, sender.process, monkeypatch)
        with pytest.raises(WeightUpdateError, match=r"a broadcast failed|no answer in"):
            engine.update_weights_from_distributed(**call, timeout=10.0)
        seen.result(HANG_SECONDS)
        with pytest.raises(WeightUpdateError, match=r"closed|no answer in"):
            engine.update_weights_from_distributed(**call, timeout=2.0)
        engine.destroy_weights_update_group("weights")
        assert not engine.can_run
    engine.update_weights_from_disk(policies[2].folder)
    assert_serves(engine, policies[2])
