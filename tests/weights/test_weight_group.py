"""A weight group connects its members, and neither end waits for the other for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.weights import group as group_module
from rollout.weights.distributed import GroupSource
from rollout.weights.group import WeightGroup
from rollout.weights.joined_groups import JoinedGroups
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port
from tests.helpers.torch_trainer import joined_trainer
from tests.helpers.weight_transports import arguments, group_of
from tests.weights.conftest import assert_serves


def test_a_group_of_nccl_is_on_the_engines_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert group_module._device("gloo", torch.device("cuda:1")) == torch.device("cpu")
    assert group_module._device("nccl", torch.device("cuda:1")) == torch.device("cuda:1")
    assert group_module._device("nccl", torch.device("cuda")) == torch.device("cuda:3")


def refused_group(**changed):
    arguments = {
        "master_address": "127.0.0.1", "master_port": free_port(), "rank": 0, "world_size": 2,
        "group_name": "weights", "timeout": 1.0,
    }  # fmt: skip
    with pytest.raises(RolloutError) as error:
        WeightGroup(**arguments | changed)
    return str(error.value)


def test_a_group_that_cannot_be_made_is_refused(engine, policies):
    for field, value in (
        ("rank", 2), ("world_size", 1), ("master_port", 0), ("group_name", ""), ("backend", "mpi"),
        ("backend", "nccl"), ("timeout", 0),
    ):  # fmt: skip
        assert refused_group(**{field: value}).startswith(f"{field}={value!r}")
    assert "rank 0 is missing" in refused_group(rank=1, timeout=0.3)
    assert "opened by this rank 0" in refused_group(world_size=3, timeout=0.3)
    with pytest.raises(InvalidInputError, match="no group of this engine"):
        engine.destroy_weights_update_group("weights")
    with pytest.raises(InvalidInputError, match="rank 0 is the sender"):
        engine.init_weights_update_group("127.0.0.1", 1, 0, 2, "weights")
    with group_of(engine), pytest.raises(InvalidInputError, match="joined already"):
        engine.init_weights_update_group("127.0.0.1", 1, 1, 2, "weights")
    assert_serves(engine, policies[0])


def test_a_sender_that_says_nothing(engine, policies):
    """The call's own timeout counts, else the open update's, else the group's."""
    call = arguments(policies[1].tensors)
    for opened, options, said in (
        ({}, {"timeout": 0.3}, r"0\.3|300ms"), ({}, {}, r"0\.4|400ms"),
        ({"timeout": 0.5}, {}, r"0\.5|500ms"),
    ):  # fmt: skip
        with group_of(engine, engine_timeout=0.4):
            if opened:
                engine.begin_weight_update(**opened)
            with pytest.raises(WeightUpdateError, match=said):
                engine.update_weights_from_distributed(**call, **options)
    assert_serves(engine, policies[0])


def test_arguments_of_an_update_are_refused_by_field(engine, policies):
    call = {"names": ["v", "w"], "dtypes": ["float32"] * 2, "shapes": [[2], [2]]}
    call |= {"group_name": "weights", "load_format": None}
    with group_of(engine):
        for field, value, named in (
            ("names", "w", "names"), ("names", ["w", ""], "names[1]"), ("names", ["w"], "dtypes"),
            ("names", ["w", "w"], "names"), ("dtypes", ["float32", "float31"], "dtypes[1]"),
            ("shapes", [[2]], "shapes"), ("shapes", [[2], 2], "shapes[1]"),
            ("shapes", [[2], [-2]], "shapes[1][0]"), ("load_format", "packed:0", "load_format"),
            ("timeout", 0, "timeout"), ("group_name", "other", "group_name"),
        ):  # fmt: skip
            with pytest.raises(InvalidInputError) as error:
                engine.update_weights_from_distributed(**call | {field: value})
            assert error.value.field == named, (field, value)
    assert_serves(engine, policies[0])


@pytest.fixture
def pair():
    """A trainer that made its group with torch alone, and the groups of a receiver in it."""
    groups = JoinedGroups()

    def join(address):
        host, port = address["master_address"], address["master_port"]
        groups.init(host, port, 1, 2, "weights", "gloo", HANG_SECONDS)

    with joined_trainer(join) as trainer:
        yield trainer, groups
        groups.close()


@pytest.mark.parametrize("load_format", [None, "packed:16", "packed"])
def test_tensors_of_torchs_own_group_come_as_they_were_sent(pair, load_format):
    """vLLM packs them: a tensor that takes a buffer beyond the size closes it; none is aligned."""
    trainer, groups = pair
    tensors = {
        "a": torch.full((3,), 2.5, dtype=torch.bfloat16),
        "b": torch.arange(6.0).reshape(2, 3),
        "c": torch.tensor(7.0, dtype=torch.bfloat16),
        "d": torch.tensor(8.0, dtype=torch.float64),
    }
    sent = list(tensors.values())
    if load_format is not None:
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in sent]
        parts = [flat] if load_format == "packed" else [flat[:2], flat[2:]]
        sent = [torch.cat(part) for part in parts]
    call = arguments(tensors) | {"load_format": load_format}
    with ThreadPoolExecutor(1) as threads:
        for _ in range(2):
            sending = threads.submit(trainer.send, sent)
            with groups.opened(GroupSource(**call), HANG_SECONDS) as received:
                for name, tensor in received:
                    assert torch.equal(tensor, tensors[name])
                    assert tensor.dtype is tensors[name].dtype
            sending.result(HANG_SECONDS)


def test_a_refusal_takes_what_torchs_group_sends_off_the_wire(pair):
    """The sender cannot be told, and must not wait for a receiver that has turned away."""
    trainer, groups = pair
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    call = arguments(tensors)
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(trainer.send, tensors.values())
        opened = groups.opened(GroupSource(**call), HANG_SECONDS)
        with pytest.raises(ValueError, match="refused"), opened:
            raise ValueError("refused")
        sent.result(HANG_SECONDS)


def test_a_trainer_that_is_missing_is_an_error():
    groups, place = JoinedGroups(), ("127.0.0.1", free_port(), 1, 2, "weights", "gloo", 0.3)
    with pytest.raises(WeightUpdateError, match="rank 0 is missing"):
        groups.init(*place)
