"""Ranks of one model each take their part of an update: the bits of whole tensors, and no more."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rollout.config import DType
from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.models.layers.weight_loader import TensorSlice
from rollout.models.loader import load_model
from rollout.parallel import ModelRanks
from rollout.weights.bucket_layout import layouts, sliced_layout
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import listen
from rollout.weights.joined_groups import JoinedGroups
from rollout.weights.manifest import TensorSpec, slices_from_json, slices_to_json
from rollout.weights.named_tensors import manifest_of
from rollout.weights.rank_stream import RankStream
from rollout.weights.shared_memory import HandleReceiver, SharedMemorySender
from rollout.weights.transaction import WeightState, WeightTransaction
from rollout.weights.update_options import UpdateOptions
from tests.helpers.biased_llama import save_biased_llama
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.tensor_cases import changed, stored
from tests.helpers.thread_ranks import on_ranks
from tests.helpers.tiny_hybrid import save_tiny_hybrid
from tests.helpers.tiny_moe import save_tiny_moe
from tests.helpers.weight_transports import TensorSource, arguments, member

BUCKET_BYTES = 16_384
CASES = {
    "biases, shared kv heads": (save_biased_llama, 4),
    "tied": (lambda folder: save_biased_llama(folder, tied=True), 2),
    "experts": (save_tiny_moe, 2),
    "several ranges": (lambda folder: save_tiny_hybrid(folder, "qwen3_5"), 2),
    "interleaved rows": (lambda folder: save_tiny_hybrid(folder, "qwen3_next"), 2),
}


class RankModel:
    """A rank's part of a model and the updates of it."""

    def __init__(self, folder, group):
        self.model = load_model(folder, DType.float32, torch.device("cpu"),
                                ranks=ModelRanks.of_tensor(group))  # fmt: skip
        passes_over = self.model.spec.passes_over
        self.weights = WeightTransaction(
            {"target": self.model}, passes_over=passes_over, ranks=group
        )

    def update(self, source, **options):
        self.weights.begin(UpdateOptions(**options), manifest_of(source), source)
        self.weights.load(source)
        self.weights.commit()

    def own(self):
        """What this rank stores."""
        loaders = self.model.weight_loaders().items()
        return {
            name: (loader.shard.loader if loader.shard else loader).read()
            for name, loader in loaders
            if loader.required
        }

    def share(self):
        """The bytes of that."""
        return sum(tensor.nbytes for tensor in self.own().values())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def received(rank_model, port, group, call):
    """An update through a weight group: the bytes that came, the most of them held at once."""
    groups = JoinedGroups()
    groups.init("127.0.0.1", port, 1 + group.rank, 1 + group.size, "weights", "gloo", HANG_SECONDS)
    with groups.source(**call, timeout=HANG_SECONDS) as source, LiveBytes() as live:
        rank_model.update(source)
    num_bytes = groups.num_bytes("weights")
    groups.close()
    return num_bytes, live.peak


def stream_of(group, tensors):
    pairs = tensors.items()
    if group.rank == 0:
        stream = RankStream.from_rank_0(group, pairs)
    else:
        stream = RankStream.of(group, manifest_of(pairs), stored=True)
    stream.open()
    return stream


@pytest.mark.parametrize("case", CASES)
def test_a_rank_gets_its_part_of_whole_tensors_by_every_transport(case, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.weights.rank_stream.CACHED_BUCKET_BYTES", BUCKET_BYTES)
    save, size = CASES[case]
    folder = save(tmp_path)
    first = stored(folder)
    new = changed(first)
    store = listen("127.0.0.1", HANG_SECONDS)

    def send():
        group = member(store, world_size=1 + size)
        with LiveBytes() as live:
            DistributedSender(group, BUCKET_BYTES).send(TensorSource(new))
        group.close()
        return live.peak

    call = arguments(new) | {"load_format": "flattened_bucket"}
    largest = max(tensor.nbytes for tensor in new.values())
    bucket = max(BUCKET_BYTES, largest) + 64 * len(new)

    with SharedMemorySender(1 << 20, num_segments=32) as sender, ThreadPoolExecutor(1) as threads:
        handles = list(sender.handles(new.items()))
        sent = threads.submit(send)

        def on_rank(group):
            rank = RankModel(folder, group)
            rank.update(list(new.items()))  # the slow way: whole tensors to each rank
            wanted, share = rank.own(), rank.share()
            assert rank.weights.num_bytes == share

            rank.update(list(first.items()))
            assert not same(rank.own(), wanted)
            num_bytes, peak = received(rank, store.port, group, call)
            assert same(rank.own(), wanted)
            assert share <= num_bytes <= share + 64 * len(new)
            assert peak <= bucket + 8192

            rank.update(list(first.items()))
            with LiveBytes() as live:
                rank.update(HandleReceiver().tensors(handles))
            assert same(rank.own(), wanted)
            assert rank.weights.num_bytes == share
            assert live.peak <= largest + 8192, "what lies apart, and indices of rows"

            rank.update(list(first.items()))
            stream = stream_of(group, new)
            rank.update(stream)
            stream.finish()
            assert same(rank.own(), wanted)
            return share

        shares = on_ranks(size, on_rank)
        assert sent.result(HANG_SECONDS) <= 2 * bucket  # what it packs and one tensor's slice
    total = sum(tensor.nbytes for tensor in new.values())
    assert max(shares) < total


def not_a_number(tensors):
    """In the last rows alone, which the last rank stores."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][-1, -1] = float("nan")


def wrong_shape(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


def missing(tensors):
    del tensors["model.layers.0.self_attn.q_proj.bias"]


def untied(tensors):
    """In the last token alone."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1] += 1


@pytest.mark.parametrize("transport", ["tensors", "shared memory", "rank 0"])
@pytest.mark.parametrize("fault", [not_a_number, wrong_shape, missing, untied])
def test_what_one_rank_refuses_is_written_by_none(fault, transport, tmp_path):
    """Only the last rank is given, or stores, what is wrong."""
    folder = save_biased_llama(tmp_path, tied=True)
    first = stored(folder)
    good, bad = changed(first), changed(first)
    fault(bad)

    def on_rank(group):
        rank = RankModel(folder, group)
        before = rank.own()
        tensors = bad if group.rank == 1 or fault is not_a_number or transport == "rank 0" else good
        with SharedMemorySender(1 << 20, num_segments=32) as sender:
            source, stream = list(tensors.items()), None
            if transport == "shared memory":
                source = HandleReceiver().tensors(list(sender.handles(tensors.items())))
            if transport == "rank 0":
                source = stream = stream_of(group, tensors)
            with pytest.raises(RolloutError) as error:
                rank.update(source, check_finite=True)
            if stream is not None:
                stream.finish()
        assert same(rank.own(), before)
        assert rank.weights.state is WeightState.WHOLE
        rank.update(list(good.items()), check_finite=True)
        return str(error.value)

    first_error, last_error = on_ranks(2, on_rank)
    culprit, other = (0, last_error) if transport == "rank 0" else (1, first_error)
    if transport != "rank 0" or fault in (not_a_number, untied):
        assert other.startswith(f"rank {culprit}: ")


def test_a_call_of_several_ends_on_all_ranks_together(tmp_path):
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
                return
            assert first_is_through.wait(HANG_SECONDS)
            raise ZeroDivisionError

        with pytest.raises((WeightUpdateError, ZeroDivisionError)) as error:
            rank.weights.load(pairs())
        assert rank.weights.state is WeightState.TORN
        rank.update(list(tensors.items()))
        assert rank.weights.serves
        return type(error.value)

    assert on_ranks(2, on_rank) == [WeightUpdateError, ZeroDivisionError]


def test_a_call_that_is_refused_on_one_rank_ends_the_update_on_all(tmp_path):
    folder = save_biased_llama(tmp_path)
    tensors = stored(folder)

    def on_rank(group):
        rank = RankModel(folder, group)
        rank.weights.begin(UpdateOptions())

        def call():
            with rank.weights.broadcast_failures():
                if group.rank:
                    raise InvalidInputError("handles", None, "must be a list of handles")
                rank.weights.load(list(tensors.items())[:3])

        with pytest.raises((InvalidInputError, WeightUpdateError)) as error:
            call()
        assert not rank.weights.is_under_way
        return type(error.value)

    assert on_ranks(2, on_rank) == [WeightUpdateError, InvalidInputError]


@pytest.mark.parametrize("who", ["rank 0 reads", "rank 0 is given", "rank 1 reads"])
def test_a_stream_that_breaks_off_ends_on_all_ranks(who, tmp_path):
    folder = save_biased_llama(tmp_path)
    tensors = stored(folder)

    def pairs():
        for index, pair in enumerate(tensors.items()):
            if index == 9 and who == "rank 0 is given":
                raise ZeroDivisionError
            yield pair

    def on_rank(group):
        rank = RankModel(folder, group)
        given = pairs() if group.rank == 0 else ()
        stream = RankStream.of(group, None, stored=False, weights=given)
        stream.open()

        def breaking():
            for index, pair in enumerate(stream):
                if index == 9 and who == f"rank {group.rank} reads":
                    raise ZeroDivisionError
                yield pair

        with pytest.raises((WeightUpdateError, ZeroDivisionError, InvalidInputError)) as error:
            rank.update(breaking())
        stream.finish(str(error.value))
        is_torn = not rank.weights.serves
        again = stream_of(group, tensors)
        rank.update(again)
        again.finish()
        assert rank.weights.serves
        return type(error.value), is_torn

    kinds, torn = zip(*on_ranks(2, on_rank), strict=True)
    if who == "rank 0 is given":
        assert torn == (False, False), "the first bucket was never full"
    else:  # the other rank may find the bucket gone before it has written
        assert torn[who == "rank 1 reads"]
    assert kinds[who == "rank 1 reads"] is ZeroDivisionError
    assert kinds[who != "rank 1 reads"] in (WeightUpdateError, InvalidInputError)


@pytest.mark.parametrize("reason", ["other hosts", "no room"])
def test_a_stream_without_shared_memory_sends_bytes(reason, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.weights.rank_stream.CACHED_BUCKET_BYTES", BUCKET_BYTES)
    folder = save_biased_llama(tmp_path)
    new = changed(stored(folder))
    if reason == "no room":
        full = WeightUpdateError("/dev/shm is full")
        monkeypatch.setattr(SharedMemorySender, "next_flat", lambda *_: raised(full))
    else:
        hosts = iter("ab")
        monkeypatch.setattr("rollout.weights.rank_stream.host_memory", lambda: next(hosts))

    def on_rank(group):
        rank = RankModel(folder, group)
        stream = stream_of(group, new)
        rank.update(stream)
        stream.finish()
        return {name: loader.read() for name, loader in rank.model.weight_loaders().items()}

    for found in on_ranks(2, on_rank):
        assert same(found, new)


def raised(error):
    raise error


def test_a_receiver_that_needs_all_is_sent_all_beside_one_that_does_not(tmp_path):
    """Two engines in one group: one rank alone, and a rank of two that needs half."""
    tensors = {
        "whole": torch.randn(7, 5),
        "split": torch.randn(9, 3),
        "fused": torch.randn(4, 6, 2),
    }
    slices = {
        "whole": None,
        "split": TensorSlice(0, (range(2, 4), range(7, 9))),
        "fused": TensorSlice(1, (range(1, 2), range(3, 6))),
    }
    store = listen("127.0.0.1", HANG_SECONDS)

    def receive(rank, needed):
        groups = JoinedGroups()
        groups.init("127.0.0.1", store.port, rank, 3, "weights", "gloo", HANG_SECONDS)
        call = arguments(tensors) | {"load_format": "flattened_bucket"}
        with groups.source(**call, timeout=HANG_SECONDS) as source:
            return {name: values.clone() for name, values in source.sliced(needed)}

    with ThreadPoolExecutor(2) as threads:
        alone = threads.submit(receive, 1, dict.fromkeys(tensors))
        part = threads.submit(receive, 2, slices)
        group = member(store, world_size=3)
        DistributedSender(group, 128).send(TensorSource(tensors))
        assert same(alone.result(HANG_SECONDS), tensors)
        wanted = {
            name: values if slices[name] is None else slices[name].of(values)
            for name, values in tensors.items()
        }
        assert same(part.result(HANG_SECONDS), wanted)
    group.close()


def test_flat_ranges_are_the_elements_of_a_slice():
    whole = torch.arange(4 * 6 * 2).view(4, 6, 2)
    for dim, ranges in ((0, (range(1, 3),)), (1, (range(0, 2), range(3, 6))), (2, (range(1, 2),))):
        where = TensorSlice(dim, ranges)
        flat = [index for each in where.flat_ranges(whole.shape) for index in each]
        assert torch.equal(torch.tensor(flat).view(where.shape_of(whole.shape)), where.of(whole))


def test_slices_travel_as_json_and_malformed_ones_are_refused():
    manifest = {"a": TensorSpec((5, 4), torch.float32), "b": TensorSpec((3,), torch.float32)}
    slices = {"a": TensorSlice(1, (range(0, 1), range(2, 4))), "b": None}
    assert slices_from_json(slices_to_json(slices), manifest, "needed") == slices
    sliced = [sliced_layout(layout, slices) for layout in layouts(manifest, 1 << 20)]
    assert [entry.shape for layout in sliced for entry in layout.entries] == [(5, 3), (3,)]
    for odd in (
        [], {"c": None}, {"a": [0]}, {"a": [2, []]}, {"a": [0, [[0, 6]]]}, {"a": [0, [[3, 2]]]},
        {"a": [0, [[2, 3], [0, 1]]]}, {"a": [0, [[1]]]}, {"a": [0, [1]]},
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="needed"):
            slices_from_json(odd, manifest, "needed")


def test_a_receiver_cannot_write_a_senders_segment():
    with SharedMemorySender(1 << 12) as sender:
        handle = next(sender.handles([("a", torch.ones(8))]))
        receiver = HandleReceiver()
        ((_, view),) = receiver.tensors([handle])
        assert torch.equal(view, torch.ones(8))
        maps = Path("/proc/self/maps").read_text().splitlines()
        modes = [line.split()[1] for line in maps if handle["segment"] in line]
        assert sorted(modes) == ["r--s", "rw-s"], "the sender's is the other"
        receiver.release()
