"""Receiving from a trainer that made its group with torch alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.weights import distributed
from rollout.weights.joined_groups import JoinedGroups
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port
from tests.helpers.torch_trainer import joined_trainer
from tests.helpers.weight_transports import arguments


@pytest.fixture
def pair():
    """A trainer, and the groups of a receiver that has joined its own."""
    groups = JoinedGroups()

    def join(address):
        host, port = address["master_address"], address["master_port"]
        groups.init(host, port, 1, 2, "weights", "gloo", HANG_SECONDS, sender="torch")

    with joined_trainer(join) as trainer:
        yield trainer, groups
        groups.close()


def test_tensors_of_any_dtype_come_as_they_were_broadcast(pair):
    trainer, groups = pair
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.full((5,), 2.5, dtype=torch.bfloat16),
        "c": torch.tensor(7.0, dtype=torch.float64),
    }
    with ThreadPoolExecutor(1) as threads:
        for _ in range(2):
            sent = threads.submit(trainer.send, tensors.values())
            source = groups.source(**arguments(tensors), load_format=None, timeout=HANG_SECONDS)
            with source as received:
                for name, tensor in received:
                    assert torch.equal(tensor, tensors[name])
                    assert tensor.dtype is tensors[name].dtype
            sent.result(HANG_SECONDS)


def test_buffers_that_vllm_packs(pair, monkeypatch):
    """Each is closed by the tensor that takes it beyond the size; none of them is aligned."""
    trainer, groups = pair
    monkeypatch.setattr(distributed, "_PACKED_BYTES", 16)
    tensors = {
        "a": torch.full((3,), 2.5, dtype=torch.bfloat16),
        "b": torch.arange(6.0).reshape(2, 3),
        "c": torch.tensor(7.0, dtype=torch.bfloat16),
        "d": torch.tensor(8.0, dtype=torch.float64),
    }
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    buffers = [torch.cat(flat[:2]), torch.cat(flat[2:])]
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(trainer.send, buffers)
        with groups.source(
            **arguments(tensors), load_format="packed", timeout=HANG_SECONDS
        ) as received:
            for name, tensor in received:
                assert torch.equal(tensor, tensors[name])
                assert tensor.dtype is tensors[name].dtype
        sent.result(HANG_SECONDS)


def test_a_refusal_takes_what_was_sent_off_the_wire(pair):
    """The sender cannot be told, and must not wait for a receiver that has turned away."""
    trainer, groups = pair
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(trainer.send, tensors.values())
        refusal = pytest.raises(ValueError, match="refused")
        with refusal, groups.source(**arguments(tensors), load_format=None, timeout=HANG_SECONDS):
            raise ValueError("refused")
        sent.result(HANG_SECONDS)


def test_buckets_of_our_own_sender_cannot_come_through_it(pair):
    _, groups = pair
    source = groups.source([], [], [], "weights", load_format="flattened_bucket", timeout=1.0)
    with pytest.raises(InvalidInputError, match="load_format=None"), source:
        pass


def test_nobody_there():
    groups = JoinedGroups()
    with pytest.raises(WeightUpdateError, match="rank 0 is missing"):
        groups.init("127.0.0.1", free_port(), 1, 2, "weights", "gloo", 1.0, sender="torch")
    with pytest.raises(InvalidInputError, match="specrollout, torch"):
        groups.init("127.0.0.1", free_port(), 1, 2, "weights", "gloo", 1.0, sender="vllm")
