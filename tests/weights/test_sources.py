"""An update asks its source for one manifest, and closes it at once where it fails.

A sharded source has other ranks waiting in its collectives, behind however many streams it lies.
Everything here is still named by the test when the update has failed, so that no reference count
does the work.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError
from rollout.weights.bucket import buckets
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.weight_transports import TensorSource, group_of


class Stream(TensorSource):
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


def test_a_sender_whose_group_closes(engine, policies):
    class Cut(Stream):
        def __next__(self):
            name, tensor = super().__next__()
            if name == list(self.tensors)[9]:
                group.close("its connection failed")
            return name, tensor

    with group_of(engine) as (group, threads):
        stream = Cut(policies[1].tensors)
        sender = DistributedSender(group, 8192)
        sent = threads.submit(sender.send, stream, HANG_SECONDS)
        with pytest.raises(WeightUpdateError):
            engine.update_weights_from_distributed(**sender.arguments(stream))
        error = sent.exception(HANG_SECONDS)
        assert isinstance(error, WeightUpdateError)
        assert stream.closed


def test_one_update_makes_one_manifest(engine, policies):
    class Counting(TensorSource):
        asked = 0

        def manifest(self):
            self.asked += 1
            return super().manifest()

    source = Counting(policies[1].tensors)
    engine.update_weights_from_tensor(source)
    assert source.asked == 1
    engine.begin_weight_update()
    engine.update_weights_from_tensor(source)
    engine.end_weight_update()
    assert source.asked == 2
    assert engine.weights_digest() == policies[1].digest
