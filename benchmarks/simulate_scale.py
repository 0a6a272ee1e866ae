"""Question: on paper, how long do 8 to 1,024 replicas idle in the tail, what does sharing a corpus
send, and how long do weights take to reach all? No bars; docs/scale.md has the answers.

    python benchmarks/simulate_scale.py                        # all tables: two minutes of one core
    python benchmarks/simulate_scale.py --only broadcast       # seconds
    python benchmarks/simulate_scale.py --replicas 8 64 --trace rollouts.jsonl --json scale.json

A discrete-event simulation with the cluster's own router. Lengths of rollouts are recorded ones, or
from a distribution fitted to such; what a step costs is computed from a model's size and a memory's
speed (`scale_replica.py`), not measured.
"""

from __future__ import annotations

import argparse
import enum
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from harness.command import POSITIVE, Command
from rich.console import Console
from rich.table import Table
from scale_cluster import SEATS, Policy, Simulation, Workload
from scale_replica import LLAMA_8B, GroupSampler, fitted, recorded

Rows = list[dict[str, Any]]

MODELS = {"8B": 16.06e9, "32B": 65.5e9}  # bytes in bfloat16
LINKS = {"100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}  # bytes/s
REPLICAS_PER_HOST = 8

BUCKET_BYTES = 512 * 2**20
LATENCY_SECONDS = 200e-6  # of a bucket: announcing it, and the answer

SHARE_SECONDS = 0.5  # between two deltas of a corpus
PIECE_BYTES = 33  # of a CorpusDelta: one entry of each array over B
TOKEN_BYTES = 4
CORPUS_BYTES = 256 * 2**20
CORPUS_BYTES_PER_TOKEN = 31  # held, with its index
INSERTED_PER_SECOND = 4e6  # tokens a core learns


class Shape(enum.StrEnum):
    FLAT = "flat"  # the trainer sends to every host, one after the other
    TREE = "tree"  # each host sends a bucket to two others, as soon as it is there
    CHAIN = "chain"  # to one other


def tail_rows(options: argparse.Namespace, lengths: GroupSampler) -> Iterator[dict[str, Any]]:
    """Weak scaling: the work grows with the cluster. Strong scaling: it is that of 64 replicas."""
    for scaling in ("weak", "strong"):
        for num_replicas in options.replicas:
            scale = num_replicas if scaling == "weak" else 64
            work = Workload(groups_per_step=max(1, options.groups * scale), samples=options.samples)
            for policy in Policy if scaling == "weak" else [Policy.SYNCHRONOUS, Policy.STREAMING]:
                for speculates in (False, True):
                    outcome = Simulation(
                        num_replicas, work, LLAMA_8B, lengths,
                        policy=policy, speculates=speculates, seed=options.seed,
                    ).run()  # fmt: skip
                    yield {
                        "scaling": scaling,
                        "replicas": num_replicas,
                        "policy": policy.value,
                        "speculation": speculates,
                        **asdict(outcome),
                    }


def traffic_rows(tails: Rows) -> Iterator[dict[str, Any]]:
    """The price of sharing the corpus at the rate of the streaming policy, where replicas are
    busiest: bytes on the wire, tokens to insert, history that fits."""
    for tail in tails:
        if (tail["scaling"], tail["policy"], tail["speculation"]) != ("weak", "streaming", True):
            continue
        replicas, rate = tail["replicas"], tail["tokens_per_second"]
        pieces_per_second = (1 - tail["empty_seats"]) * SEATS / SHARE_SECONDS
        sent = TOKEN_BYTES * rate + PIECE_BYTES * pieces_per_second
        receivers_of = {
            "all to all": replicas - 1,
            "8 others, in turn": min(8, replicas - 1),
            "groups that spread": tail["spread"],  # those that run rollouts of the same prompt
        }
        for fan_out, receivers in receivers_of.items():
            held = CORPUS_BYTES / CORPUS_BYTES_PER_TOKEN
            yield {
                "replicas": replicas,
                "fan_out": fan_out,
                "received_per_replica": sent * receivers,
                "total": sent * receivers * replicas,
                "core_share": rate * receivers / INSERTED_PER_SECOND,
                "seconds_held": held / (rate * (1 + receivers)),
            }


def broadcast_seconds(
    shape: Shape,
    num_hosts: int,
    num_bytes: float,
    bytes_per_second: float,
    bucket_bytes: float = BUCKET_BYTES,
) -> float:
    """Seconds from the first byte of a weight update until the last host has the last bucket.

    A link sends one bucket at a time and receives another meanwhile. Hosts at one level of a tree
    are alike, so the one that is served last at every level is the last of all.
    """
    sizes = np.full(math.ceil(num_bytes / bucket_bytes), float(bucket_bytes))
    sizes[-1] = num_bytes - bucket_bytes * (sizes.size - 1)
    times_K = sizes / bytes_per_second + LATENCY_SECONDS
    if shape is Shape.FLAT:
        return float(num_hosts * times_K.sum())
    fan_out = min(2, num_hosts) if shape is Shape.TREE else 1
    arrivals_K = np.zeros(sizes.size)
    # The fan_out copies of a bucket leave one after the other; the last is what is followed.
    for _ in range(_depth(fan_out, num_hosts)):
        arrivals_K = _served(arrivals_K, fan_out * times_K)
    return float(arrivals_K[-1])


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


def _depth(fan_out: int, num_hosts: int) -> int:
    """Levels below the trainer that the hosts fill."""
    levels, room = 0, 0
    while room < num_hosts:
        levels += 1
        room += fan_out**levels
    return levels


def _served(arrivals_K: np.ndarray, times_K: np.ndarray) -> np.ndarray:
    """When each leaves a server that takes them in order, one at a time (Lindley's recursion)."""
    before_K = np.cumsum(times_K) - times_K
    return np.maximum.accumulate(arrivals_K - before_K) + before_K + times_K


def broadcast_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model, num_bytes in MODELS.items():
        for link, speed in LINKS.items():
            for num_replicas in options.replicas:
                hosts = -(-num_replicas // REPLICAS_PER_HOST)
                for shape in Shape:
                    bucket, best = best_bucket(shape, hosts, num_bytes, speed)
                    yield {
                        "model": model,
                        "link": link,
                        "replicas": num_replicas,
                        "hosts": hosts,
                        "shape": shape.value,
                        "seconds": broadcast_seconds(shape, hosts, num_bytes, speed),
                        "best_bucket_bytes": bucket,
                        "best_seconds": best,
                    }


def show(title: str, rows: Rows) -> None:
    if not rows:
        return
    table = Table(*rows[0], title=title)
    for entry in rows:
        table.add_row(*(_shown(value) for value in entry.values()))
    Console(width=150).print(table)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def make_command() -> Command:
    command = Command(__doc__)
    help = "lengths: a trace (.npz) or a job's rollouts (.jsonl); default: a fitted distribution"
    command.option("--trace", type=Path, help=help)
    command.option("--replicas", [8, 64, 256, 1024], quick=[8], nargs="+", limits=POSITIVE)
    command.option("--groups", 16, quick=2, limits=POSITIVE, help="per replica and step")
    command.option("--samples", 8, limits=POSITIVE, help="per group")
    command.option("--seed", 0)
    return command


def main() -> None:
    options = make_command().parse()
    lengths = fitted if options.trace is None else recorded(options.trace)
    drawn = np.concatenate([lengths(np.random.default_rng(i), options.samples) for i in range(999)])
    print(f"lengths: mean {drawn.mean():.0f}, median {np.median(drawn):.0f}, max {drawn.max()}")
    wanted = options.only or ["tail", "broadcast"]
    tails = list(tail_rows(options, lengths)) if "tail" in wanted else []
    tables = {
        "tail": tails,
        "traffic": list(traffic_rows(tails)),
        "broadcast": list(broadcast_rows(options)) if "broadcast" in wanted else [],
    }
    for title, rows in tables.items():
        show(title, rows)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
