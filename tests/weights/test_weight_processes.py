"""Senders that are processes of their own, and die by SIGKILL in the middle of an update."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.errors import WeightUpdateError
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port
from tests.helpers.weight_peer import CLOSED, peer, send, share
from tests.helpers.weight_transports import group_of, send_to
from tests.weights.conftest import assert_refuses, assert_serves


def test_shared_memory_of_a_sender_that_dies(engine, policies):
    """Between two buckets: torn. Its segment is left, and goes with the next sender."""
    with peer(share, policies[1].folder, after=9) as dying:
        handles = []

        def kept():
            for handle in dying.handles():
                handles.append(handle)
                yield handle

        with pytest.raises(EOFError, match="died"):
            engine.update_weights_from_ipc(kept())
    assert_refuses(engine)
    left = Path("/dev/shm") / handles[0]["segment"]
    with peer(share, policies[2].folder) as sender:
        engine.update_weights_from_ipc(sender.handles())
    assert_serves(engine, policies[2])
    assert not left.exists()


def test_a_group_whose_sender_dies(engine, policies):
    port = free_port()
    with peer(send, policies[1].folder, port, after=9) as sender:
        engine.init_weights_update_group("127.0.0.1", port, 1, 2, "weights", timeout=HANG_SECONDS)
        call = sender.hear("arguments")
        with pytest.raises(WeightUpdateError, match=CLOSED):
            engine.update_weights_from_distributed(**call, timeout=HANG_SECONDS)
    assert_refuses(engine)
    with pytest.raises(WeightUpdateError, match=r"closed|cannot be reached"):
        engine.update_weights_from_distributed(**call, timeout=2.0)
    engine.destroy_weights_update_group("weights")
    with group_of(engine) as (group, threads):
        send_to(engine, group, threads, policies[2].tensors)
    assert_serves(engine, policies[2])
