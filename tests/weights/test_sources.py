"""An update that fails closes its source at once.

A sharded source has other ranks waiting in its collectives, behind however many streams it lies.
Everything here is still named by the test when the update has failed, so that no reference count
does the work.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.errors import EngineStateError, InvalidInputError
from rollout.weights.bucket import buckets
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.weight_transports import Announced


class Stream(Announced):
    """Knows whether it was closed before its end; never closed by being forgotten."""

    def __init__(self, tensors) -> None:
        super().__init__(tensors)
        self.closed = False
        self._pairs = iter(tensors.items())

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._pairs)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bad(policies) -> Stream:
    """Fails in its second tensor, long before its end."""
    tensors = dict(policies[1].tensors)
    second = list(tensors)[1]
    tensors[second] = torch.full_like(tensors[second], float("nan"))
    return Stream(tensors)


def test_a_stream_in_buckets_is_closed(engine, bad):
    stream = buckets(bad, 8192)
    with pytest.raises(InvalidInputError, match="NaN"):
        engine.update_weights_from_tensor(stream, load_format="flattened_bucket", check_finite=True)
    assert bad.closed


def test_a_stream_in_handles_is_closed(engine, bad):
    with SharedMemorySender(8192) as sender:
        handles = sender.handles(bad)
        with pytest.raises(InvalidInputError, match="NaN"):
            engine.update_weights_from_ipc(handles, check_finite=True)
        assert bad.closed


def test_a_stream_is_closed_with_its_sender(policies):
    stream = Stream(policies[1].tensors)
    with SharedMemorySender(8192) as sender:
        handles = sender.handles(stream)
        handle = next(handles)
        sender.close()
        for each in (handles, sender.handles(policies[1].tensors.items())):
            with pytest.raises(EngineStateError, match="closed") as error:
                next(each)
        assert stream.closed
        assert not (Path("/dev/shm") / handle["segment"]).exists()
    assert error.value
