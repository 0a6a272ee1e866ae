"""Ranks of one model each take their slices of an update's whole tensors, and no more."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from rollout.config import DType
from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.models.layers.weight_loader import TensorSlice
from rollout.models.loader import load_model
from rollout.parallel import ModelRanks
from rollout.weights.bucket import tensor_source
from rollout.weights.distributed import GroupSource
from rollout.weights.joined_groups import JoinedGroups
from rollout.weights.manifest import TensorSpec, slices_from_json, slices_to_json
from rollout.weights.rank_stream import RankStream
from rollout.weights.receiver import WeightReceiver
from rollout.weights.shared_memory import HandleReceiver, SharedMemorySender
from rollout.weights.source import TensorSource
from rollout.weights.transaction import WeightState, WeightTransaction
from rollout.weights.update_options import UpdateOptions
from tests.helpers.biased_llama import save_biased_llama
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port
from tests.helpers.tensor_cases import changed, stored
from tests.helpers.thread_ranks import on_ranks
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.weight_transports import arguments, sending_end

BUCKET_BYTES = 16_384
CASES = {
    "biases, shared kv heads": (save_biased_llama, 4),
    "experts": (save_tiny_moe, 2),
    "interleaved rows": (lambda folder: save_tiny_hybrid(folder, "qwen3_next"), 2),
}


class RankModel:
    """A rank's part of a model and the updates of it."""

    def __init__(self, folder, group):
        ranks = ModelRanks.of_tensor(group)
        self.model = load_model(folder, DType.float32, torch.device("cpu"), ranks=ranks)
        passes_over = self.model.spec.passes_over
        self.weights = WeightTransaction(
            {"target": self.model}, passes_over=passes_over, ranks=group
        )

    def update(self, source, **options):
        source = tensor_source(source)
        self.weights.begin(UpdateOptions(**options), source=source)
        self.weights.load(source)
        self.weights.commit()

    def own(self):
        """The tensors that this rank stores."""
        loaders = self.model.weight_loaders().items()
        return {
            name: (loader.shard.loader if loader.shard else loader).read()
            for name, loader in loaders
            if loader.required
        }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def received(rank_model, port, group, call):
    """Receive an update through a weight group."""
    groups = JoinedGroups()
    groups.init("127.0.0.1", port, 1 + group.rank, 1 + group.size, "weights", "gloo", HANG_SECONDS)
    with groups.opened(GroupSource(**call), HANG_SECONDS) as source:
        rank_model.update(source)
    groups.close()


def shared_stream(group, tensors):
    stream = RankStream.from_rank_0(group, tensor_source(tensors))
    return (RankStream(group, stream.spec) if group.rank else stream).shared()


@pytest.mark.parametrize("case", CASES)
def test_a_rank_gets_its_part_of_whole_tensors_by_every_transport(case, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.weights.rank_stream.CACHED_BUCKET_BYTES", BUCKET_BYTES)
    save, size = CASES[case]
    folder = save(tmp_path)
    first = stored(folder)
    new = changed(first)
    port = free_port()

    def send():
        group = sending_end(port, 1 + size)
        for tensor in new.values():
            group.broadcast(tensor)
        group.close()

    call = arguments(new)
    with SharedMemorySender(1 << 20, num_segments=32) as sender, ThreadPoolExecutor(1) as threads:
        handles = list(sender.handles(new.items()))
        sent = threads.submit(send)

        def on_rank(group):
            rank = RankModel(folder, group)
            rank.update(new.items())  # the slow way: whole tensors to each rank
            wanted = rank.own()
            share = sum(tensor.nbytes for tensor in wanted.values())
            assert rank.weights.num_bytes == share

            rank.update(first.items())
            assert not same(rank.own(), wanted)
            received(rank, port, group, call)
            assert same(rank.own(), wanted)

            rank.update(first.items())
            rank.update(HandleReceiver().tensors(handles))
            assert same(rank.own(), wanted)
            assert rank.weights.num_bytes == share

            rank.update(first.items())
            with shared_stream(group, new) as stream:
                rank.update(stream)
            assert same(rank.own(), wanted)
            return share

        shares = on_ranks(size, on_rank)
        sent.result(HANG_SECONDS)
    assert max(shares) < sum(tensor.nbytes for tensor in new.values())


def not_a_number(tensors):
    """In the last rows alone, which the last rank stores."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][-1, -1] = float("nan")


def wrong_shape(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


@pytest.mark.parametrize("transport", ["tensors", "rank 0"])
@pytest.mark.parametrize("fault", [not_a_number, wrong_shape])
def test_what_one_rank_refuses_is_written_by_none(fault, transport, tmp_path):
    """Only the last rank is given, or stores, what is wrong."""
    folder = save_biased_llama(tmp_path)
    good, bad = changed(stored(folder)), changed(stored(folder))
    fault(bad)

    def on_rank(group):
        rank = RankModel(folder, group)
        before = rank.own()
        given = bad if group.rank == 1 or fault is not_a_number else good
        opened = shared_stream(group, bad) if transport == "rank 0" else nullcontext(given.items())
        with pytest.raises(RolloutError), opened as source:
            rank.update(source, check_finite=True)
        assert same(rank.own(), before)
        assert rank.weights.state is WeightState.WHOLE
        rank.update(good.items(), check_finite=True)

    on_ranks(2, on_rank)


def test_a_call_that_fails_on_one_rank_ends_the_update_on_all(tmp_path):
    """Its tensors may be gone when it returns, so no rank returns while another reads."""
    folder = save_biased_llama(tmp_path)
    tensors = stored(folder)
    first_is_through = threading.Event()

    def on_rank(group):
        rank = RankModel(folder, group)
        rank.weights.begin(UpdateOptions())

        def pairs():
            yield from tensors.items()
            if group.rank == 0:
                first_is_through.set()
            else:
                assert first_is_through.wait(HANG_SECONDS)
                raise ZeroDivisionError

        kind = ZeroDivisionError if group.rank else WeightUpdateError
        with pytest.raises(kind), rank.weights.broadcast_failures():
            rank.weights.load(TensorSource(pairs()))
        assert not rank.weights.is_under_way
        assert not rank.weights.serves
        rank.update(tensors.items())
        assert rank.weights.serves

    on_ranks(2, on_rank)


def test_a_refused_begin_leaves_the_update_under_way(tmp_path):
    folder = save_biased_llama(tmp_path)
    tensors = stored(folder)

    def on_rank(group):
        rank = RankModel(folder, group)
        receiver = WeightReceiver(rank.weights, torch.device("cpu"), group)
        receiver.begin(None, {})
        first, *others = tensors.items()
        receiver.update(TensorSource([first]), {})
        with pytest.raises(WeightUpdateError, match="under way"):
            receiver.begin(None, {})
        receiver.update(TensorSource(others), {})
        receiver.end()
        assert rank.weights.serves

    on_ranks(2, on_rank)


def test_a_group_too_small_for_all_ranks_is_joined_by_none(tmp_path):
    folder = save_biased_llama(tmp_path)

    def on_rank(group):
        receiver = WeightReceiver(RankModel(folder, group).weights, torch.device("cpu"), group)
        for offset, size, name in ((0, 3, "rank_offset"), (1, 2, "world_size")):
            with pytest.raises(InvalidInputError, match=name):
                receiver.init_group("127.0.0.1", 1, offset, size, "weights", "gloo", HANG_SECONDS)

    on_ranks(2, on_rank)


@pytest.mark.parametrize("is_given", [True, False])
def test_a_stream_that_breaks_off_ends_on_all_ranks(is_given, tmp_path):
    """It breaks off where rank 0 is given it, or where rank 1 reads it."""
    folder = save_biased_llama(tmp_path)
    tensors = stored(folder)

    def broken_off(pairs):
        yield from itertools.islice(pairs, 9)
        raise ZeroDivisionError

    def on_rank(group):
        rank = RankModel(folder, group)
        given = iter(tensors.items())
        opened = shared_stream(group, broken_off(given) if is_given else given)
        breaks_off_here = group.rank == (0 if is_given else 1)
        kinds = ZeroDivisionError if breaks_off_here else (WeightUpdateError, InvalidInputError)
        with pytest.raises(kinds), opened as stream:
            rank.update(broken_off(stream) if breaks_off_here and not is_given else stream)
        if is_given:
            assert rank.weights.serves, "the first bucket was never full"
        with shared_stream(group, tensors) as again:
            rank.update(again)
        assert rank.weights.serves

    on_ranks(2, on_rank)


@pytest.mark.parametrize("reason", ["other hosts", "no room"])
def test_a_stream_without_shared_memory_sends_bytes(reason, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.weights.rank_stream.CACHED_BUCKET_BYTES", BUCKET_BYTES)
    folder = save_biased_llama(tmp_path)
    new = changed(stored(folder))
    if reason == "no room":
        full = Mock(side_effect=WeightUpdateError("/dev/shm is full"))
        monkeypatch.setattr(SharedMemorySender, "next_flat", full)
    else:
        hosts = iter("ab")
        monkeypatch.setattr("rollout.weights.rank_stream.host_memory", lambda: next(hosts))

    def on_rank(group):
        rank = RankModel(folder, group)
        with shared_stream(group, new) as stream:
            rank.update(stream)
        return {name: loader.read() for name, loader in rank.model.weight_loaders().items()}

    for found in on_ranks(2, on_rank):
        assert same(found, new)


def test_slices_travel_as_json_and_malformed_ones_are_refused():
    manifest = {"a": TensorSpec((5, 4), torch.float32), "b": TensorSpec((3,), torch.float32)}
    slices = {"a": TensorSlice(1, (range(0, 1), range(2, 4))), "b": None}
    assert slices_from_json(slices_to_json(slices), manifest, "needed") == slices
    for odd in (
        [], {"c": None}, {"a": [0]}, {"a": [2, []]}, {"a": [0, [[0, 6]]]}, {"a": [0, [[3, 2]]]},
        {"a": [0, [[2, 3], [0, 1]]]}, {"a": [0, [[1]]]}, {"a": [0, [1]]},
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="needed"):
            slices_from_json(odd, manifest, "needed")
    whole = torch.arange(4 * 6 * 2).view(4, 6, 2)
    for dim, ranges in ((0, (range(1, 3),)), (1, (range(0, 2), range(3, 6))), (2, (range(1, 2),))):
        where = TensorSlice(dim, ranges)
        flat = [index for each in where.flat_ranges(whole.shape) for index in each]
        assert torch.equal(torch.tensor(flat).view(where.shape_of(whole.shape)), where.of(whole))
