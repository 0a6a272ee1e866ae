"""Question: how fast is a weight update by each transport beside a plain copy_ of the same bytes,
and how much memory does either end hold meanwhile?

    python benchmarks/bench_weights.py [--threads 1] [--rounds 7] [--json FILE]

A figure is a whole update, checks and commit included, of an engine that has run before; the median
of rounds in which all transports take turns. Senders of shared memory and gloo are processes of
their own. Peak extra memory is sampled in first updates, before any buffer is held. Bars: 0.7 of
copy_'s speed in process, 0.4 through shared memory; one bucket, or the largest tensor, of memory.

`--only "two ranks"` compares an engine of two ranks with one of one rank, and needs no model: give
it three cores. Bar: two take at most 1.15x the time of one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.command import POSITIVE, Command, Part, Parts
from harness.rows import Row, row
from harness.timing import Call, in_turns
from weight_ranks import HeldWeights, rank_rows

from rollout import RolloutEngine, SamplingParams
from rollout.weights.bucket import CACHED_BUCKET_BYTES, DEFAULT_BUCKET_BYTES, buckets
from rollout.weights.distributed_sender import DistributedSender
from rollout.weights.group import WeightGroup
from rollout.weights.shared_memory import SharedMemorySender

MIB = 2**20
BUCKET_BYTES = (CACHED_BUCKET_BYTES, 16 * MIB, DEFAULT_BUCKET_BYTES)
SLACK = 8 * MIB  # what the allocator and Python do with a few hundred names
BARS = {  # of the speed of copy_
    "in process": 0.7,
    f"shared memory, {CACHED_BUCKET_BYTES // MIB} MiB buckets": 0.4,
}


def share(asked: Connection, options: argparse.Namespace, bucket_bytes: int) -> None:
    """The process that shares memory: an update when asked, the next handle when asked again."""
    torch.set_num_threads(options.threads)
    weights = HeldWeights(options.model)
    with SharedMemorySender(bucket_bytes, num_segments=2) as sender:
        while asked.recv():
            for handle in sender.handles(weights):
                asked.send(handle)
                asked.recv()
            asked.send(None)


def send(asked: Connection, options: argparse.Namespace, bucket_bytes: int, port: int) -> None:
    """The process that sends updates through a group, when asked."""
    torch.set_num_threads(options.threads)
    weights = HeldWeights(options.model)
    group = WeightGroup(
        master_address="127.0.0.1", master_port=port, rank=0, world_size=2, group_name="bench",
    )  # fmt: skip
    sender = DistributedSender(group, bucket_bytes)
    asked.send(sender.arguments(weights))
    while asked.recv():
        sender.send(weights)


class Sender:
    """Another process that holds the weights and sends them."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def handles(self) -> Iterator[dict[str, Any]]:
        """Each is asked for while the one before is read: the sender has two segments."""
        self.connection.send(True)
        while (handle := self.connection.recv()) is not None:
            self.connection.send(True)
            yield handle

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join()


class HeldMemory:
    """Anonymous and shared memory that processes hold beyond what they did, sampled meanwhile.

    Pages the engine maps of a sender's segment are the sender's.
    """

    def __init__(self, sender: Sender | None) -> None:
        self._files: list[tuple[Path, tuple[str, ...]]] = [
            (Path("/proc/self/status"), ("RssAnon",))
        ]
        if sender is not None:
            of_sender = Path(f"/proc/{sender.process.pid}/status")
            self._files.append((of_sender, ("RssAnon", "RssShmem")))
        self._before = self._bytes()
        self.peak = 0  # of one process: what a trainer's host or an engine's must have to spare
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _bytes(self) -> list[int]:
        found = []
        for file, fields in self._files:
            lines = (line.split() for line in file.read_text().splitlines())
            found.append(sum(int(line[1]) * 1024 for line in lines if line[0][:-1] in fields))
        return found

    def _sample(self) -> None:
        while not self._is_done.wait(0.001):
            held = [now - before for now, before in zip(self._bytes(), self._before, strict=True)]
            self.peak = max(self.peak, *held)

    def __enter__(self) -> HeldMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        self._thread.join()


class Updates:
    """An engine that has run, the weights it is sent, and rows of the ways to send them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._weights = HeldWeights(options.model)
        self._engine = RolloutEngine.from_pretrained(options.model, spec="none", dtype="bfloat16")
        self._engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
        self._engine.update_weights_from_tensor(self._weights)
        self._copies = {name: torch.empty_like(tensor) for name, tensor in self._weights}

    def in_process(self) -> Iterator[Row]:
        engine, pairs = self._engine, list(self._weights)
        calls: dict[str, Call] = {
            "in process": lambda: engine.update_weights_from_tensor(pairs),
            "disk": lambda: engine.update_weights_from_disk(self._options.model),
        }
        yield from self._rows(calls, {}, SLACK, "")

    def in_buckets(self, bucket_bytes: int) -> Iterator[Row]:
        """The transports that pack buckets, and the processes that send."""
        engine, options, port = self._engine, self._options, free_port()
        with ExitStack() as stack:
            sharing = stack.enter_context(Sender(share, options, bucket_bytes))
            sending = stack.enter_context(Sender(send, options, bucket_bytes, port))
            engine.init_weights_update_group("127.0.0.1", port, 1, 2, "bench", timeout=120)
            stack.callback(engine.destroy_weights_update_group, "bench")
            arguments = sending.connection.recv()

            def flattened() -> None:
                stream = buckets(self._weights, bucket_bytes)
                engine.update_weights_from_tensor(stream, load_format="flattened_bucket")

            def distributed() -> None:
                sending.connection.send(True)
                engine.update_weights_from_distributed(**arguments)

            calls: dict[str, Call] = {
                "flattened bucket": flattened,
                "shared memory": lambda: engine.update_weights_from_ipc(sharing.handles()),
                "gloo": distributed,
            }
            largest = max(spec.num_bytes for spec in self._weights.manifest().values())
            # A tensor larger than one of the two segments makes that one grow.
            allowed = max(bucket_bytes, largest + bucket_bytes // 2) + SLACK
            senders = {"shared memory": sharing, "gloo": sending}
            suffix = f", {bucket_bytes // MIB} MiB buckets"
            yield from self._rows(calls, senders, allowed, suffix)

    def _rows(
        self, calls: Mapping[str, Call], senders: Mapping[str, Sender], allowed: int, suffix: str
    ) -> Iterator[Row]:
        for name, call in calls.items():
            with HeldMemory(senders.get(name)) as held:
                call()
            label = f"{name}{suffix}, peak extra memory"
            yield row(label, held.peak / MIB, "MiB", allowed / MIB, at_most=True)
        every: dict[str, Call] = {"copy_": self._copy, **calls}
        seconds = {
            name: median(each) for name, each in in_turns(every, self._options.rounds).items()
        }
        for name in every:
            yield row(f"{name}{suffix}", self._weights.num_bytes / seconds[name] / 1e9, "GB/s")
        for name in calls:
            ratio = seconds["copy_"] / seconds[name]
            yield row(f"{name}{suffix} / copy_", ratio, "ratio", BARS.get(name + suffix))

    def _copy(self) -> None:
        for name, tensor in self._weights:
            self._copies[name].copy_(tensor)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def parts(options: argparse.Namespace) -> Parts:
    updates = cache(lambda: Updates(options))  # two ranks need none of it

    def in_buckets(size: int) -> Iterator[Row]:
        return updates().in_buckets(size)

    of_size: dict[str, Part] = {
        f"{size // MIB} MiB buckets": partial(in_buckets, size) for size in BUCKET_BYTES
    }
    ranks: Part = partial(rank_rows, options)
    return {"in process": lambda: updates().in_process(), **of_size, "two ranks": ranks}


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.threads(1)
    command.option("--rounds", 7, quick=1, limits=POSITIVE, help="that medians are taken of")
    return command


if __name__ == "__main__":
    make_command().run("weight updates, {threads} threads per process", parts)
