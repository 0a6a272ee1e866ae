"""Question: on paper, how long do 8 to 1,024 replicas idle in the tail, what does sharing a corpus
send, and how long do weights take to reach all? No bars; docs/scale.md has the answers.

    python benchmarks/simulate_scale.py                        # all tables: two minutes of one core
    python benchmarks/simulate_scale.py --only broadcast       # seconds
    python benchmarks/simulate_scale.py --replicas 8 64 --trace rollouts.jsonl --json scale.json

A simulation with the cluster's own router (`scale_cluster.py`). Lengths of rollouts are recorded
ones, or from a distribution fitted to such; what a step costs is computed from a model's size and a
memory's speed, not measured.
"""

from __future__ import annotations

import argparse
import enum
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from harness.command import POSITIVE, Command, parts_of
from harness.rows import Row, row
from scale_cluster import MAX_RUNNING, Outcome, Policy, Simulation, fitted, recorded

MODELS = {"8B": 16.06e9, "32B": 65.5e9}  # bytes in bfloat16
LINKS = {"100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}  # bytes/s
REPLICAS_PER_HOST = 8
SAMPLES = 8  # of a group

BUCKET_BYTES = 512 * 2**20
LATENCY_SECONDS = 200e-6  # of a bucket: announcing it, and the answer

SHARE_SECONDS = 0.5  # between two deltas of a corpus
PIECE_BYTES = 33  # of a CorpusDelta: one entry of each array over B
TOKEN_BYTES = 4
CORPUS_BYTES = 256 * 2**20
CORPUS_BYTES_PER_TOKEN = 31  # held, with its index
INSERTED_PER_SECOND = 4e6  # tokens a core learns

UNITS = {
    "step_seconds": "s", "idle": "of time", "unused": "of requests", "tail": "of a step",
    "tokens_per_second": "tokens/s a replica", "stale": "of rollouts", "spread": "of groups",
}  # fmt: skip


class Shape(enum.StrEnum):
    FLAT = "flat"  # the trainer sends to every host, one after the other
    TREE = "tree"  # each host sends a bucket to two others, as soon as it is there
    CHAIN = "chain"  # to one other


def tail_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Weak scaling: the work grows with the cluster. Strong scaling: it is that of 64 replicas."""
    lengths = fitted if options.trace is None else recorded(options.trace)
    drawn = np.concatenate([lengths(np.random.default_rng(i), SAMPLES) for i in range(999)])
    yield row("lengths: mean", float(drawn.mean()), "tokens")
    yield row("lengths: median", float(np.median(drawn)), "tokens")
    for scaling in ("weak", "strong"):
        for num_replicas in options.replicas:
            scale = num_replicas if scaling == "weak" else 64
            for policy in Policy if scaling == "weak" else [Policy.SYNCHRONOUS, Policy.STREAMING]:
                for speculates in (False, True):
                    outcome = Simulation(
                        num_replicas, lengths, policy=policy, speculates=speculates,
                        groups_per_step=options.groups * scale, samples=SAMPLES,
                    ).run()  # fmt: skip
                    drafts = "drafts" if speculates else "no drafts"
                    label = f"{scaling}, {policy}, {num_replicas} replicas, {drafts}"
                    for name, value in asdict(outcome).items():
                        yield row(f"{label}: {name.replace('_', ' ')}", value, UNITS[name])
                    if (scaling, policy, speculates) == ("weak", Policy.STREAMING, True):
                        yield from traffic_rows(num_replicas, outcome)


def traffic_rows(replicas: int, outcome: Outcome) -> Iterator[Row]:
    """The price of sharing the corpus at the rate of the streaming policy, where replicas are
    busiest: bytes on the wire, tokens to insert, history that fits."""
    rate = outcome.tokens_per_second
    pieces_per_second = (1 - outcome.unused) * MAX_RUNNING / SHARE_SECONDS
    sent = TOKEN_BYTES * rate + PIECE_BYTES * pieces_per_second
    receivers_of = {
        "all to all": replicas - 1,
        "8 others, in turn": min(8, replicas - 1),
        "groups that spread": outcome.spread,  # those that run rollouts of the same prompt
    }
    for fan_out, receivers in receivers_of.items():
        label = f"corpus, {replicas} replicas, {fan_out}"
        held = CORPUS_BYTES / CORPUS_BYTES_PER_TOKEN
        yield row(f"{label}: received by each", sent * receivers / 1e6, "MB/s")
        yield row(f"{label}: in all", sent * receivers * replicas / 1e6, "MB/s")
        yield row(f"{label}: inserting", rate * receivers / INSERTED_PER_SECOND, "of a core")
        yield row(f"{label}: history", held / (rate * (1 + receivers)), "s")


def broadcast_seconds(
    shape: Shape,
    num_hosts: int,
    num_bytes: float,
    bytes_per_second: float,
    bucket_bytes: float = BUCKET_BYTES,
) -> float:
    """Seconds from the first byte of a weight update until the last host has the last bucket.

    A link sends one bucket at a time and receives another meanwhile. Hosts at one level of a tree
    are alike, so the one that is served last at every level is the last of all. A level passes
    buckets on at the rate that it gets them: the first one travels alone, the others follow it.
    """
    once = num_bytes / bytes_per_second + math.ceil(num_bytes / bucket_bytes) * LATENCY_SECONDS
    if shape is Shape.FLAT:
        return num_hosts * once
    fan_out = min(2, num_hosts) if shape is Shape.TREE else 1
    levels, room = 0, 0
    while room < num_hosts:
        levels += 1
        room += fan_out**levels
    first = min(bucket_bytes, num_bytes) / bytes_per_second + LATENCY_SECONDS
    # The fan_out copies of a bucket leave one after the other; the last is what is followed.
    return fan_out * (once + (levels - 1) * first)


def best_bucket(
    shape: Shape, num_hosts: int, num_bytes: float, bytes_per_second: float
) -> tuple[int, float]:
    """The power of two that is fastest, and its time."""
    times = {
        2**exponent: broadcast_seconds(shape, num_hosts, num_bytes, bytes_per_second, 2**exponent)
        for exponent in range(20, 31)
    }
    best = min(times, key=times.__getitem__)
    return best, times[best]


def broadcast_rows(options: argparse.Namespace) -> Iterator[Row]:
    for model, num_bytes in MODELS.items():
        for link, speed in LINKS.items():
            for num_replicas in options.replicas:
                hosts = -(-num_replicas // REPLICAS_PER_HOST)
                for shape in Shape:
                    label = f"{model}, {link}, {hosts} hosts, {shape}"
                    bucket, best = best_bucket(shape, hosts, num_bytes, speed)
                    seconds = broadcast_seconds(shape, hosts, num_bytes, speed)
                    yield row(f"{label}: 512 MiB buckets", seconds, "s")
                    yield row(f"{label}: the best bucket", best, "s")
                    yield row(f"{label}: its size", bucket / 2**20, "MiB")


PARTS = {"tail": tail_rows, "broadcast": broadcast_rows}


def make_command() -> Command:
    command = Command(__doc__)
    help = "lengths: a trace (.npz) or a job's rollouts (.jsonl); default: a fitted distribution"
    command.option("--trace", type=Path, help=help)
    command.option("--replicas", [8, 64, 256, 1024], quick=[8], nargs="+", limits=POSITIVE)
    command.option("--groups", 16, quick=2, limits=POSITIVE, help="per replica and step")
    return command


if __name__ == "__main__":
    make_command().run("many replicas, on paper", parts_of(PARTS))
