"""An engine frees senders' memory when they remove it, when it sleeps and when it is closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout import RolloutEngine
from rollout.errors import InvalidInputError
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.weight_transports import group_of
from tests.weights.conftest import outputs


def orphans() -> set[str]:
    """Segments this process maps although nobody owns them any more."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in maps if "specrollout-" in line and line.endswith("(deleted)")}


def update_from_a_sender_that_goes(engine, policy) -> None:
    with SharedMemorySender(8192) as sender:
        engine.update_weights_from_ipc(sender.handles(policy.tensors.items()))


@pytest.fixture
def own_engine(policies):
    engine = RolloutEngine.from_pretrained(policies[0].folder, max_running=4)
    engine.weights_digest()
    yield engine
    engine.close()


@pytest.fixture
def mapped(own_engine):
    before = orphans()  # of engines that other tests in this process left open
    return lambda: orphans() - before


def test_a_sender_that_goes_in_the_middle_of_an_update(own_engine, policies, mapped):
    """The segments it removed are let go of when the update ends."""
    with SharedMemorySender(8192) as sender:

        def handles():
            yield from sender.handles(policies[1].tensors.items())
            sender.close()

        own_engine.update_weights_from_ipc(handles())
    assert not mapped()
    assert own_engine.weights_digest() == policies[1].digest


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"]])
def test_sleeping(own_engine, policies, mapped, tags):
    update_from_a_sender_that_goes(own_engine, policies[1])
    own_engine.release_memory(tags)
    assert not mapped()
    own_engine.resume_memory()
    update_from_a_sender_that_goes(own_engine, policies[2])
    assert own_engine.weights_digest() == policies[2].digest


def test_closing(own_engine, policies, mapped):
    """It leaves its groups and lets go of its segments; it generates as before."""
    update_from_a_sender_that_goes(own_engine, policies[1])
    with pytest.raises(InvalidInputError, match="no group of this engine"), group_of(own_engine):
        own_engine.close()  # so it is in no group any more that could be destroyed
    assert not mapped()
    assert outputs(own_engine) == policies[1].outputs
    own_engine.close()
