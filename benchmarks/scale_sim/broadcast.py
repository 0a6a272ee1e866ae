"""How long a weight update takes to reach every host, bucket by bucket."""

from __future__ import annotations

import enum
import math

import numpy as np

BUCKET_BYTES = 512 * 2**20
LATENCY_SECONDS = 200e-6  # of a bucket: announcing it, and the answer


class Shape(enum.StrEnum):
    FLAT = "flat"  # the trainer sends to every host, one after the other
    TREE = "tree"  # each host sends what it gets to two others, as soon as a bucket is there
    CHAIN = "chain"  # to one other


def broadcast_seconds(
    shape: Shape,
    num_hosts: int,
    num_bytes: float,
    bytes_per_second: float,
    bucket_bytes: float = BUCKET_BYTES,
) -> float:
    """From the first byte until the last host has the last bucket.

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
    sizes = [2**exponent for exponent in range(20, 31)]
    times = [
        broadcast_seconds(shape, num_hosts, num_bytes, bytes_per_second, size) for size in sizes
    ]
    best = int(np.argmin(times))
    return sizes[best], times[best]


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
