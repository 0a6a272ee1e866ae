"""A weight group without an engine: how it connects, and where its tensors are."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from rollout.errors import WeightUpdateError
from rollout.parallel.time_limit import within
from rollout.weights import group as group_module
from rollout.weights.group import listen
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.weight_transports import member


def test_members_are_connected_when_they_have_joined():
    store = listen("127.0.0.1", HANG_SECONDS)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(member, store)
        receiver, sender = member(store, 1), other.result(HANG_SECONDS)
        tensor = torch.zeros(3)
        sent = threads.submit(sender.broadcast, torch.arange(3.0))
        receiver.broadcast(tensor)
        sent.result(HANG_SECONDS)
    assert torch.equal(tensor, torch.arange(3.0))
    sender.close()
    receiver.close()


def test_members_that_meet_and_do_not_connect(monkeypatch):
    """NCCL's first broadcast can hang so, whatever timeout it was given."""
    hung = threading.Event()
    monkeypatch.setattr(
        group_module, "_wait", lambda works, backend, seconds, own_timeout: hung.wait(HANG_SECONDS)
    )
    # They have all the time to meet, and none to connect.
    monkeypatch.setattr(group_module, "within", lambda seconds, call: within(0.1, call))
    store = listen("127.0.0.1", HANG_SECONDS)
    try:
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(member, store)
            for join in (partial(member, store, 1), partial(other.result, HANG_SECONDS)):
                with pytest.raises(WeightUpdateError, match="did not connect"):
                    join()
    finally:
        hung.set()


def test_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert group_module._device("gloo", torch.device("cuda:1")) == torch.device("cpu")
    assert group_module._device("nccl", torch.device("cuda:1")) == torch.device("cuda:1")
    assert group_module._device("nccl", torch.device("cuda")) == torch.device("cuda:3")
    assert group_module._device("nccl", None) == torch.device("cuda:3")


@pytest.mark.parametrize(("setting", "warns"), [(None, True), ("3", True), ("0", False)])
def test_a_watchdog_that_would_end_the_process_is_warned_of(monkeypatch, caplog, setting, warns):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv(name, setting)
    with caplog.at_level(logging.WARNING):
        group_module._warn_of_error_handling("weights")
    assert (name in caplog.text) is warns
