"""One op on one shape of a GPU: what it needs at least, and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from replay_bench.roofline import Ceilings

from rollout.runner.graphs.capture import CudaCapture

COLD = 400e6  # bytes: several times the L2 cache

Call = Callable[[], object]


@dataclass(kw_only=True)
class Case:
    """One op on one shape. Calls do the same on different buffers."""

    name: str
    ours: Sequence[Call]
    theirs: Sequence[Call] = ()
    num_bytes: float = 0.0
    flop: float = 0.0
    bar: float | None = None  # least floor / time

    def floor_us(self, ceilings: Ceilings) -> float:
        bytes_seconds = self.num_bytes / ceilings.bytes_per_second
        return 1e6 * max(bytes_seconds, self.flop / ceilings.flop_per_second)


def microseconds(calls: Sequence[Call]) -> float:
    """Of one call: the median over replays of a graph that makes them all.

    Raises RuntimeError for what cannot be captured, and TritonError for what cannot be compiled;
    the next one can be timed all the same.
    """

    def run() -> None:
        for call in calls:
            call()

    graph = CudaCapture(torch.device("cuda", torch.cuda.current_device()))(run)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def copies(num_bytes: float) -> int:
    return int(min(24, max(2, COLD // num_bytes + 1)))


def each(function: Callable[..., object], *columns: Sequence[object]) -> list[Call]:
    return [partial(function, *args) for args in zip(*columns, strict=True)]
