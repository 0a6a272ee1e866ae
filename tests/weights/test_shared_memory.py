"""Segments and handles: who owns them, who may name them, and which bucket they are of."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError
from rollout.weights.segment import OwnedSegment, remove_orphans
from rollout.weights.shared_memory import HandleReceiver, SharedMemoryHandle, SharedMemorySender
from tests.helpers.forked import forked
from tests.helpers.in_fork import in_fork

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


def test_a_stream_of_handles(sender):
    for _ in range(2):
        found = received(sender.handles(TENSORS.items()))
        assert list(found) == list(TENSORS)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_segments_are_reused_and_removed(sender):
    names = {handle["segment"] for handle in sender.handles(TENSORS.items())}
    assert len(names) == 2
    assert all((SHM / name).stat().st_mode & 0o777 == 0o600 for name in names)
    assert {handle["segment"] for handle in sender.handles(TENSORS.items())} == names
    header = 64
    assert sum((SHM / name).stat().st_size - header for name in names) <= 128, "one bucket in all"
    sender.close()
    assert not any((SHM / name).exists() for name in names)


def test_a_receiver_that_dies_leaves_the_sender_as_it_was(sender):
    next(sender.handles(TENSORS.items()))
    found = received(sender.handles(TENSORS.items()))
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


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


def test_a_layout_larger_than_a_segment_that_is_mapped_already(sender, handle):
    """Refused before a byte is read, whatever the handle says of the rest."""
    receiver = HandleReceiver()
    assert len(list(receiver.tensors(handle))) == 1
    (entry,) = handle["layout"]["entries"]
    entry |= {"shape": [32], "end": 128}
    handle["layout"]["num_bytes"] = 128
    with pytest.raises(InvalidInputError, match="more than the 64 bytes") as error:
        receiver.tensors([handle])
    assert error.value.field == "handles[0].layout.num_bytes"


def test_a_closed_sender(sender, monkeypatch):
    under_way = sender.handles(TENSORS.items())
    handle = next(under_way)
    sender.close()
    monkeypatch.setattr("rollout.weights.shared_memory.OwnedSegment", None)  # it makes none
    for stream in (under_way, sender.handles(TENSORS.items())):
        with pytest.raises(EngineStateError, match="closed"):
            next(stream)
    assert not (SHM / handle["segment"]).exists()


def own_and_die(pipe):
    segment = OwnedSegment(100)
    pipe.send(segment.name)
    os.kill(os.getpid(), signal.SIGKILL)


def test_segments_of_the_dead_are_removed_and_no_others(sender, handle):
    mine, theirs = Pipe()
    dead = forked(own_and_die, theirs)
    name = mine.recv()
    dead.join()
    foreign = SHM / f"specrollout-of-process-{os.getpid()}"
    foreign.touch()
    try:
        remove_orphans()
        assert name.startswith("specrollout-")
        assert not (SHM / name).exists()
        assert foreign.exists()
        assert (SHM / handle["segment"]).exists(), "its owner lives"
    finally:
        foreign.unlink()


def share_and_wait(pipe):
    sender = SharedMemorySender(128)
    pipe.send(next(sender.handles(TENSORS.items())))
    pipe.recv()


def test_who_lets_go_removes_the_segments_of_the_dead(sender, handle):
    mine, theirs = Pipe()
    dying = forked(share_and_wait, theirs)
    try:
        dead = mine.recv()
        receiver = HandleReceiver()
        assert len(list(receiver.tensors([dead]))) == len(list(receiver.tensors([handle])))
        receiver.release()
        assert (SHM / dead["segment"]).exists()
        assert len(list(receiver.tensors([dead, handle]))) > 0
    finally:
        dying.kill()
        dying.join()
    receiver.release()
    assert not (SHM / dead["segment"]).exists()
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


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../../etc/passwd", "specrollout-", "specrollout-../../etc/passwd",
     "specrollout-" + "0" * 31 + "/", "specrollout-" + "0" * 32 + "\n", "psm_1234"],
)  # fmt: skip
def test_only_our_own_segments_are_opened(handle, name):
    with pytest.raises(InvalidInputError, match=r"handles\[0\]\.segment.*must be a segment"):
        received(handle | {"segment": name})


def test_segments_that_are_not_what_they_should_be(handle):
    name = "specrollout-" + secrets.token_hex(16)
    with pytest.raises(InvalidInputError, match="cannot be opened"):
        received(handle | {"segment": name})
    (SHM / name).symlink_to("/etc/passwd")
    try:
        with pytest.raises(InvalidInputError, match="cannot be opened"):
            received(handle | {"segment": name})
        (SHM / name).unlink()
        made = SHM / f"made-{name}"
        with made.open("wb") as owned:
            owned.write(bytes(100))
            owned.flush()
            fcntl.flock(owned, fcntl.LOCK_EX)  # unlocked, a test beside this one would remove it
            made.rename(SHM / name)
            with pytest.raises(InvalidInputError, match="holds 100 bytes"):
                received(handle | {"segment": name})
    finally:
        (SHM / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("kind", "pickle", "handles[0].kind"),
        ("nonce", "xyz", "handles[0].nonce"),
        ("nonce", "00" * 16, "handles[0].nonce"),
        ("nonce", "ab" * 15, "handles[0].nonce"),
        ("nonce", 7, "handles[0].nonce"),
        ("segment", None, "handles[0].segment"),
        ("layout", {"num_bytes": 1}, "handles[0].layout"),
        ("more", 1, "handles[0]"),
    ],
)
def test_malformed_handles_are_refused_by_field(handle, field, value, named):
    with pytest.raises(InvalidInputError) as error:
        received([handle | {field: value}])
    assert error.value.field == named


@pytest.mark.parametrize("value", [None, "handle", 3, [], {}])
def test_what_is_no_handle(value):
    with pytest.raises(InvalidInputError, match=r"handles\[0\]"):
        received([value])


def test_handles_round_trip(handle):
    assert SharedMemoryHandle.from_json(handle).to_json() == handle
