"""Segments have one owner, a handle names a segment and the bucket in it, and an engine lets go."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path

import pytest
import torch

from rollout import RolloutEngine
from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.weights.segment import OwnedSegment, remove_orphans
from rollout.weights.shared_memory import HandleReceiver, SharedMemoryHandle, SharedMemorySender
from tests.helpers.in_fork import in_fork
from tests.helpers.weight_transports import group_of
from tests.weights.conftest import outputs

SHM = Path("/dev/shm")
TENSORS = {f"t{i}": torch.full((16,), float(i)) for i in range(6)}


def received(handles) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in HandleReceiver().tensors(handles)}


@pytest.fixture
def sender():
    with SharedMemorySender(128, num_segments=2) as found:
        yield found


@pytest.fixture
def handle(sender):
    return json.loads(json.dumps(next(sender.handles(TENSORS.items()))))


def test_segments_are_reused_by_each_stream_and_removed_with_the_sender(sender):
    next(sender.handles(TENSORS.items()))  # of a receiver that died
    for _ in range(2):
        handles = []
        found = received(handles.append(each) or each for each in sender.handles(TENSORS.items()))
        assert list(found) == list(TENSORS)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        names = {handle["segment"] for handle in handles}
    assert len(names) == 2
    assert {handle["segment"] for handle in sender.handles(TENSORS.items())} == names
    assert all((SHM / name).stat().st_mode & 0o777 == 0o600 for name in names)
    header = 64
    assert sum((SHM / name).stat().st_size - header for name in names) <= 128, "one bucket in all"
    sender.close()
    assert not any((SHM / name).exists() for name in names)


def test_a_tensor_larger_than_a_segment_makes_it_grow(sender):
    tensors = TENSORS | {"large": torch.randn(500)}
    receiver = HandleReceiver()
    for _ in range(2):
        found = {n: t.clone() for n, t in receiver.tensors(sender.handles(tensors.items()))}
        assert torch.equal(found["large"], tensors["large"])


def test_handles_are_valid_while_their_bucket_is_there(sender):
    """Two segments: the first two are both there until the third is asked for."""
    stream = sender.handles(TENSORS.items())
    first, second = next(stream), next(stream)
    assert len(received([first, second])) == 2 * len(first["layout"]["entries"])
    tensors = iter(HandleReceiver().tensors(first))
    next(tensors)
    next(stream)
    with pytest.raises(WeightUpdateError, match="refilled"):
        list(tensors)
    with pytest.raises(InvalidInputError, match=r"handles\[1\]\.nonce.*no longer"):
        received([second, first])


def test_segments_without_an_owner_are_removed_and_no_others(handle):
    """The lock of an owner that dies goes with its process; here, with its file."""
    orphan = SHM / ("specrollout-" + secrets.token_hex(16))
    foreign = SHM / f"specrollout-of-process-{os.getpid()}"
    foreign.touch()
    orphan.touch()
    remove_orphans()
    assert not orphan.exists()
    assert foreign.exists()
    foreign.unlink()
    assert (SHM / handle["segment"]).exists(), "its owner lives"


def test_a_fork_of_the_owner_leaves_the_segment():
    segment = OwnedSegment(100)
    assert in_fork(segment.close) == 0
    assert (SHM / segment.name).exists()
    segment.close()
    assert not (SHM / segment.name).exists()


def test_no_room():
    with pytest.raises(WeightUpdateError, match=r"bytes free.*--shm-size"):
        OwnedSegment(shutil.disk_usage(SHM).total + 2**20)


def test_segments_that_are_not_what_they_should_be(handle):
    for name in ("/etc/passwd", "specrollout-../../etc/passwd", "specrollout-" + "0" * 32 + "\n"):
        with pytest.raises(InvalidInputError, match=r"handles\[0\]\.segment.*must be a segment"):
            received(handle | {"segment": name})
    link = SHM / ("specrollout-" + secrets.token_hex(16))
    link.symlink_to("/etc/passwd")
    try:
        with pytest.raises(InvalidInputError, match="cannot be opened"):
            received(handle | {"segment": link.name})
    finally:
        link.unlink()
    os.truncate(SHM / handle["segment"], 100)
    with pytest.raises(InvalidInputError, match="holds 100 bytes"):
        received(handle)


def test_malformed_handles_are_refused_by_field(handle):
    assert SharedMemoryHandle.from_json(handle).to_json() == handle
    for field, value, named in (
        ("kind", "pickle", "handles[0].kind"),
        ("nonce", "xyz", "handles[0].nonce"),
        ("nonce", "00" * 16, "handles[0].nonce"),
        ("nonce", "ab" * 15, "handles[0].nonce"),
        ("segment", None, "handles[0].segment"),
        ("layout", {"num_bytes": 1}, "handles[0].layout"),
        ("more", 1, "handles[0]"),
    ):
        with pytest.raises(InvalidInputError) as error:
            received([handle | {field: value}])
        assert error.value.field == named, (field, value)
    for value in (None, "handle", {}):
        with pytest.raises(InvalidInputError, match=r"handles\[0\]"):
            received([value])
    receiver = HandleReceiver()
    assert len(list(receiver.tensors(handle))) == 1
    (entry,) = handle["layout"]["entries"]
    entry |= {"shape": [32], "end": 128}
    handle["layout"]["num_bytes"] = 128
    with pytest.raises(InvalidInputError, match="more than the 64 bytes"):
        receiver.tensors([handle])


def test_a_receiver_cannot_write_a_senders_segment(handle):
    receiver = HandleReceiver()
    ((_, view),) = receiver.tensors([handle])
    assert torch.equal(view, TENSORS["t0"])
    maps = Path("/proc/self/maps").read_text().splitlines()
    modes = [line.split()[1] for line in maps if handle["segment"] in line]
    assert sorted(modes) == ["r--s", "rw-s"], "the sender's is the other"
    receiver.release()


def orphans() -> set[str]:
    """Segments this process maps although nobody owns them any more."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in maps if "specrollout-" in line and line.endswith("(deleted)")}


@pytest.fixture
def own_engine(policies):
    engine = RolloutEngine.from_pretrained(policies[0].folder, max_running=4)
    yield engine
    engine.close()


def test_an_engine_lets_go_of_segments_at_an_updates_end_or_as_it_sleeps(own_engine, policies):
    before = orphans()  # of engines that other tests in this process left open
    for policy, closes_early in ((policies[1], True), (policies[2], False)):
        with SharedMemorySender(8192) as sender:

            def handles(sender=sender, policy=policy, closes_early=closes_early):
                yield from sender.handles(policy.tensors.items())
                if closes_early:
                    sender.close()

            own_engine.update_weights_from_ipc(handles())
        if not closes_early:
            own_engine.release_memory(["kv_cache"])
            own_engine.resume_memory()
        assert not orphans() - before
        assert own_engine.weights_digest() == policy.digest


def test_a_closed_engine_leaves_its_groups_and_still_generates(own_engine, policies):
    with pytest.raises(InvalidInputError, match="no group of this engine"), group_of(own_engine):
        own_engine.close()  # so it is in no group any more that could be destroyed
    assert outputs(own_engine) == policies[0].outputs
