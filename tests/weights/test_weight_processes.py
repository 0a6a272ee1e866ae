"""Senders and receivers that are processes of their own, and die by SIGKILL in the middle."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.parallel import time_limit
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import WeightGroup, listen
from rollout.weights.group_store import GroupStore
from rollout.weights.shared_memory import SharedMemorySender
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.ports import free_port
from tests.helpers.weight_peer import peer, receive, send, share
from tests.helpers.weight_transports import TensorSource, group_of
from tests.weights.conftest import assert_serves, outputs

CLOSED = r"onnection (closed|reset|refused)|roken pipe|cannot be reached"
"""What is said of a member whose connections have ended, unlike of one that is late."""


class Slow(TensorSource):
    """Leaves time for what goes wrong elsewhere to be noticed in the middle."""

    def __iter__(self):
        for pair in super().__iter__():
            time.sleep(0.05)
            yield pair


def assert_refuses(engine):
    assert not engine.can_run
    assert "torn" in engine.unavailable_reason
    with pytest.raises(RolloutError, match="torn"):
        outputs(engine)


def update(engine, sender, threads, policy):
    """A whole update through the sender's group."""
    source = TensorSource(policy.tensors)
    sent = threads.submit(sender.send, source)
    engine.update_weights_from_distributed(**sender.arguments(source))
    sent.result(HANG_SECONDS)


def test_shared_memory_of_a_sender_that_dies(engine, policies):
    """Between two buckets, by its own hand: torn; its segment is left, and goes with the next."""
    with peer(share, policies[1].folder, after=9) as dying:
        handles = []

        def kept():
            for handle in dying.handles():
                handles.append(handle)
                yield handle

        with pytest.raises(EOFError, match="died"):
            engine.update_weights_from_ipc(kept())
    assert_refuses(engine)
    left = Path("/dev/shm") / handles[0]["segment"]
    with peer(share, policies[2].folder) as sender:
        engine.update_weights_from_ipc(sender.handles())
    assert_serves(engine, policies[2])
    assert not left.exists()


def test_shared_memory_outlives_its_sender_while_it_is_read(engine, policies):
    """A bucket that was handed over whole is whole, whatever happens to who made it."""
    with peer(share, policies[1].folder) as sender:
        handle = next(iter(sender.handles()))
        segment = Path("/dev/shm") / handle["segment"]
        spare = segment.with_name(f"kept-{segment.name}")
        spare.hardlink_to(segment)
        sender.process.kill()
        sender.process.join()
        with spare.open("rb") as held:  # else a test beside this one may remove the orphan
            fcntl.flock(held, fcntl.LOCK_EX)
            spare.replace(segment)  # back, where one has
            spare.unlink(missing_ok=True)
            engine.update_weights_from_ipc(handle, partial=True)
    entry = handle["layout"]["entries"][0]
    sent = policies[1].tensors[entry["name"]].flatten()[:5].tolist()
    assert engine.get_weights_by_name(entry["name"], 5) == sent
    SharedMemorySender().close()  # takes what was left behind


def test_a_group_whose_sender_dies(engine, policies):
    port = free_port()
    with peer(send, policies[1].folder, port, 2, after=9) as sender:
        engine.init_weights_update_group("127.0.0.1", port, 1, 2, "weights", timeout=HANG_SECONDS)
        call = sender.hear("arguments")
        with pytest.raises(WeightUpdateError, match=CLOSED):
            engine.update_weights_from_distributed(**call, timeout=HANG_SECONDS)
    assert_refuses(engine)
    with pytest.raises(WeightUpdateError, match=r"closed|cannot be reached"):
        engine.update_weights_from_distributed(**call, timeout=2.0)
    engine.destroy_weights_update_group("weights")
    with group_of(engine) as (group, threads):
        update(engine, DistributedSender(group, 8192), threads, policies[2])
    assert_serves(engine, policies[2])


def stopped(process, monkeypatch):
    """Waits until it is; from then on an answer of its store need not be waited for."""
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    monkeypatch.setattr(time_limit, "ANSWER_SECONDS", 0.5)


@pytest.mark.parametrize("after", [-1, 9], ids=["before it sends", "in the middle"])
def test_a_group_whose_sender_is_stopped(engine, policies, after, monkeypatch):
    """Its connections stay open, and its store answers nobody."""
    port = free_port()
    with (
        peer(send, policies[1].folder, port, 2, after=after, by=signal.SIGSTOP) as sender,
        ThreadPoolExecutor(1) as threads,
    ):
        engine.init_weights_update_group("127.0.0.1", port, 1, 2, "weights", timeout=HANG_SECONDS)
        call = sender.hear("arguments")
        seen = threads.submit(stopped, sender.process, monkeypatch)
        if after < 0:
            os.kill(sender.process.pid, signal.SIGSTOP)
            seen.result(HANG_SECONDS)
        seconds = 2.0 if after < 0 else 10.0  # what comes before it stops has time to come
        with pytest.raises(WeightUpdateError, match=r"a broadcast failed|no answer in"):
            engine.update_weights_from_distributed(**call, timeout=seconds)
        seen.result(HANG_SECONDS)
        with pytest.raises(WeightUpdateError, match=r"closed|no answer in"):
            engine.update_weights_from_distributed(**call, timeout=2.0)
        engine.destroy_weights_update_group("weights")
        assert engine.can_run == (after < 0)
    engine.update_weights_from_disk(policies[2].folder)
    assert_serves(engine, policies[2])


def test_a_group_whose_sender_was_stopped_before_it_was_joined(engine, policies, monkeypatch):
    port = free_port()
    with peer(send, policies[1].folder, port, 2) as sender:
        wait_until(lambda: listens(port))
        os.kill(sender.process.pid, signal.SIGSTOP)
        stopped(sender.process, monkeypatch)
        with pytest.raises(WeightUpdateError, match="rank 0 is missing"):
            engine.init_weights_update_group("127.0.0.1", port, 1, 2, "weights", timeout=0.5)
    assert_serves(engine, policies[0])


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_group_of_which_one_receiver_dies(engine, policies):
    """The sender and the other receiver end in an error, soon."""
    store = listen("127.0.0.1", HANG_SECONDS)
    with (
        peer(receive, store.port, 2, 3, after=9) as dying,
        group_of(engine, 3, store) as (group, threads),
    ):
        source = Slow(policies[1].tensors)
        sender = DistributedSender(group, 8192)
        call = sender.arguments(source)
        dying.hear("joined")
        dying.tell(call)
        sent = threads.submit(sender.send, source)
        with pytest.raises(WeightUpdateError, match=CLOSED):
            engine.update_weights_from_distributed(**call, timeout=HANG_SECONDS)
        with pytest.raises(WeightUpdateError, match=CLOSED):
            sent.result(HANG_SECONDS)
    assert_refuses(engine)
    engine.update_weights_from_disk(policies[2].folder)
    assert_serves(engine, policies[2])


def test_what_one_receiver_refuses_reaches_none(engine, policies):
    store = listen("127.0.0.1", HANG_SECONDS)
    with peer(receive, store.port, 2, 3) as other, group_of(engine, 3, store) as (group, threads):
        odd = TensorSource(policies[1].tensors | {"odd": policies[1].tensors["model.norm.weight"]})
        sender = DistributedSender(group, 8192)
        call = sender.arguments(odd)
        other.hear("joined")
        other.tell(call)
        sent = threads.submit(sender.send, odd)
        with pytest.raises(InvalidInputError, match="odd"):
            engine.update_weights_from_distributed(**call)
        assert "rank 1" in str(sent.exception(HANG_SECONDS))
        assert "odd" in other.hear("error")
    assert_serves(engine, policies[0])


def refused_group(**changed):
    arguments = {
        "master_address": "127.0.0.1", "master_port": free_port(), "rank": 0, "world_size": 2,
        "group_name": "weights", "timeout": 1.0,
    }  # fmt: skip
    with pytest.raises(RolloutError) as error:
        WeightGroup(**arguments | changed)
    return str(error.value)


def test_a_group_with_members_missing(engine, policies):
    assert "rank 0 is missing" in refused_group(rank=1, timeout=0.3)
    assert "missing after 1 seconds: 1, 2" in refused_group(world_size=3)
    with pytest.raises(WeightUpdateError, match="rank 0 is missing"):
        engine.init_weights_update_group("127.0.0.1", free_port(), 1, 2, "weights", timeout=0.3)
    assert_serves(engine, policies[0])


@pytest.mark.parametrize("told", [2, 3])
def test_a_group_of_the_wrong_size(engine, policies, told):
    """Each side is told at once what the other was told, whoever is right."""
    store = listen("127.0.0.1", HANG_SECONDS)
    size = 5 - told
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(
            refused_group,
            master_port=store.port,
            world_size=size,
            store=store,
            timeout=HANG_SECONDS,
        )
        with pytest.raises(WeightUpdateError, match=f"'world_size': {size}.*'world_size': {told}"):
            engine.init_weights_update_group(
                "127.0.0.1", store.port, 1, told, "weights", timeout=HANG_SECONDS
            )
        assert f"'world_size': {told}" in other.result(HANG_SECONDS)
    assert_serves(engine, policies[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 2), ("rank", -1), ("world_size", 1), ("master_port", 0), ("group_name", ""),
        ("backend", "mpi"), ("backend", "nccl"), ("timeout", 0), ("timeout", "long"),
    ],
)  # fmt: skip
def test_arguments_of_a_group(field, value):
    assert refused_group(**{field: value}).startswith(f"{field}={value!r}")


def test_a_rank_is_taken_once():
    store = listen("127.0.0.1", HANG_SECONDS)
    refused_group(master_port=store.port, store=store)
    assert "rank 0 is taken" in refused_group(master_port=store.port, store=store)


def test_a_sender_that_says_nothing(engine, policies):
    with group_of(engine) as (group, _):
        source = TensorSource(policies[1].tensors)
        call = DistributedSender(group, 8192).arguments(source)
        with pytest.raises(WeightUpdateError, match=r"announced nothing in 0\.5 seconds"):
            engine.update_weights_from_distributed(**call, timeout=0.5)
        assert_serves(engine, policies[0])
        call["load_format"] = None
        with pytest.raises(WeightUpdateError, match=r"0\.5|500ms"):
            engine.update_weights_from_distributed(**call, timeout=0.5)
        assert_serves(engine, policies[0])


def test_an_open_update_has_its_own_timeout(engine, policies, monkeypatch):
    waits = []
    collect = GroupStore.collect

    def counted(notes, keys, seconds, accept):
        waits.append(seconds)
        return collect(notes, keys, seconds, accept)

    with group_of(engine) as (group, _):
        call = DistributedSender(group, 8192).arguments(TensorSource(policies[1].tensors))
        engine.begin_weight_update(timeout=3.0)
        monkeypatch.setattr(GroupStore, "collect", counted)
        with pytest.raises(WeightUpdateError, match="announced nothing in 3 seconds"):
            engine.update_weights_from_distributed(**call)
        assert waits == [3.0], "waited for once"
        assert_serves(engine, policies[0])


@pytest.mark.parametrize("load_format", ["flattened_bucket", None])
def test_what_a_group_was_joined_with_is_the_default(engine, policies, load_format):
    with group_of(engine, engine_timeout=1.0) as (group, _):
        call = DistributedSender(group, 8192).arguments(TensorSource(policies[1].tensors))
        with pytest.raises(WeightUpdateError, match=r"nothing in 1 seconds|1000ms|for 1 seconds"):
            engine.update_weights_from_distributed(**call | {"load_format": load_format})
        assert_serves(engine, policies[0])


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("names", "w", "names"), ("names", ["w", ""], "names[1]"), ("names", ["w", "w"], "names"),
        ("names", ["w"], "dtypes"), ("dtypes", ["float32"], "dtypes"),
        ("dtypes", ["float32", "float31"], "dtypes[1]"), ("shapes", [[2]], "shapes"),
        ("shapes", [[2], 2], "shapes[1]"), ("shapes", [[2], [-2]], "shapes[1][0]"),
        ("load_format", "pickle", "load_format"), ("timeout", 0, "timeout"),
        ("group_name", "other", "group_name"),
    ],
)  # fmt: skip
def test_arguments_of_an_update_are_refused_by_field(engine, policies, field, value, named):
    call = {"names": ["v", "w"], "dtypes": ["float32"] * 2, "shapes": [[2], [2]]}
    call |= {"group_name": "weights", "load_format": None}
    with group_of(engine), pytest.raises(InvalidInputError) as error:
        engine.update_weights_from_distributed(**call | {field: value})
    assert error.value.field == named
    assert_serves(engine, policies[0])


def test_receivers_that_say_nothing(engine, policies):
    with group_of(engine) as (group, threads):
        sender = DistributedSender(group, 8192)
        with pytest.raises(WeightUpdateError, match=r"no answer in 0\.5 seconds from rank 1"):
            sender.send(TensorSource(policies[1].tensors), timeout=0.5)
        # What it gave up is forgotten: the next update is taken for itself.
        update(engine, sender, threads, policies[2])
    assert_serves(engine, policies[2])


def test_notes_are_written_over_and_never_removed(engine, policies):
    """A reader that saw a key there would wait for it without end if it then went."""
    store = listen("127.0.0.1", HANG_SECONDS)
    with group_of(engine, store=store) as (group, threads):
        sender, counts = DistributedSender(group, 8192), []
        for policy in (policies[1], policies[2], policies[1]):
            with pytest.raises(WeightUpdateError, match="no answer"):
                sender.send(TensorSource(policy.tensors), timeout=0.05)
            update(engine, sender, threads, policy)
            counts.append(store.num_keys())
        assert len(set(counts)) == 1
        assert not hasattr(group.notes, "remove")
    assert_serves(engine, policies[1])


def test_a_sender_that_stops_in_the_middle(engine, policies):
    """Its own source fails: every receiver hears why."""

    class Failing(TensorSource):
        def __iter__(self):
            for index, pair in enumerate(super().__iter__()):
                if index == 9:
                    raise ValueError("the trainer ran out of memory")
                yield pair

    with group_of(engine) as (group, threads):
        sender, source = DistributedSender(group, 8192), Failing(policies[1].tensors)
        sent = threads.submit(sender.send, source)
        with pytest.raises(WeightUpdateError, match="the trainer ran out of memory"):
            engine.update_weights_from_distributed(**sender.arguments(source))
        assert isinstance(sent.exception(HANG_SECONDS), ValueError)
    assert_refuses(engine)


def test_groups_go_by_name(engine):
    with pytest.raises(InvalidInputError, match="no group of this engine"):
        engine.destroy_weights_update_group("weights")
    with pytest.raises(InvalidInputError, match="rank 0 is the sender"):
        engine.init_weights_update_group("127.0.0.1", 1, 0, 2, "weights")
    with group_of(engine), pytest.raises(InvalidInputError, match="joined already"):
        engine.init_weights_update_group("127.0.0.1", 1, 1, 2, "weights")
