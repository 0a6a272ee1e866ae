"""One rank's receiver takes every kind of source."""

from __future__ import annotations

import pickle

import pytest
import torch
from safetensors.torch import save_file

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.parallel import SingleRank
from rollout.weights.bucket import BucketSource, PackedBucket, buckets
from rollout.weights.disk_source import DiskSource
from rollout.weights.distributed import GroupSource
from rollout.weights.rank_messages import readable_by_all
from rollout.weights.receiver import WeightReceiver
from rollout.weights.shared_memory import HandleSource, SharedMemorySender
from rollout.weights.source import TensorSource, refuse_not_finite
from rollout.weights.transaction import WeightTransaction
from tests.helpers.plain_part import PlainPart

NEW = {"a": torch.full((3,), 7.0), "b": torch.full((2, 5), 8.0)}


@pytest.fixture
def part() -> PlainPart:
    return PlainPart({name: torch.zeros_like(tensor) for name, tensor in NEW.items()})


@pytest.fixture
def receiver(part) -> WeightReceiver:
    weights = WeightTransaction({"target": part})
    return WeightReceiver(weights, torch.device("cpu"), SingleRank())


def pickled(source):
    return pickle.loads(pickle.dumps(source))


def test_every_source_is_an_update(receiver, part, tmp_path):
    save_file(NEW, tmp_path / "model.safetensors")
    with SharedMemorySender(1 << 12) as sender:
        handles = list(sender.handles(NEW.items()))
        for source in (
            TensorSource(NEW),
            TensorSource(iter(NEW.items())),
            BucketSource(buckets(NEW.items(), 64)),
            PackedBucket.of(next(buckets(NEW.items()))),
            pickled(DiskSource(tmp_path)),
            pickled(HandleSource(handles)),
            HandleSource(iter(handles)),
        ):
            for tensor in part.own.values():
                tensor.zero_()
            counts = receiver.update(source, {"check_finite": True})
            assert counts.stored == {"target": 2}
            assert all(torch.equal(part.own[name], tensor) for name, tensor in NEW.items())
    receiver.close()


def test_ranks_get_what_they_can_read():
    group = GroupSource(["a"], [torch.bfloat16], [(3,)], "g", "packed:64")
    assert pickled(group).manifest() == group.manifest()
    with pytest.raises(InvalidInputError, match=r"handles=.*must be a list"):
        readable_by_all(HandleSource(iter([])), SingleRank())


def test_what_is_done_before_a_commit_may_end_the_update(part):
    def leave(options):
        raise MemoryError(f"flush_cache={options.flush_cache}")

    weights = WeightTransaction({"target": part})
    receiver = WeightReceiver(weights, torch.device("cpu"), SingleRank(), leave)
    with pytest.raises(MemoryError, match="flush_cache=False"):
        receiver.update(TensorSource(NEW), {"flush_cache": False})
    assert "leaving the old weights failed" in weights.reason


def test_options_belong_to_the_call_that_begins(receiver):
    with pytest.raises(InvalidInputError, match=r"manifest\['a'\]"):
        receiver.begin({"a": (3,)}, {})
    with pytest.raises(InvalidInputError, match="source"):
        receiver.update(NEW, {})
    receiver.begin(None, {"timeout": 5.0})
    with pytest.raises(InvalidInputError, match=r"partial.*begin_weight_update alone"):
        receiver.update(TensorSource(NEW), {"partial": True})
    assert receiver.update(TensorSource(NEW), {}) is None
    receiver.end(7)
    assert receiver.weights.version == 7
    with pytest.raises(WeightUpdateError, match="no update is under way"):
        receiver.end()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_values_whose_sum_is_not_are_taken(dtype):
    largest = torch.finfo(dtype).max
    refuse_not_finite("a", torch.full((300,), largest, dtype=dtype))
    for bad in ([float("nan")], [float("inf")], [float("inf"), -float("inf")]):
        with pytest.raises(InvalidInputError, match=f"{len(bad)} values of {len(bad) + 1}"):
            refuse_not_finite("a", torch.tensor([largest, *bad], dtype=dtype))
