"""One op on one shape: what it needs at least, how long it takes, and steps as attention sees them.

Legend: T query rows, H heads, K kv heads, D head_dim, E hidden, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from harness.roofline import Ceilings
from harness.timing import Call

from rollout.config import MemoryConfig
from rollout.ops.paged_attention import AttentionPlan
from rollout.ops.transfers import upload
from rollout.runner.batch_layout import StepArrays, attention_plan
from rollout.runner.graphs import Buckets
from rollout.runner.graphs.capture import CudaCapture

COLD = 400e6  # bytes: several times the L2 cache


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
        return 1e6 * ceilings.floor_seconds(self.num_bytes, self.flop)


def microseconds(calls: Sequence[Call]) -> float:
    """Time of one call: the median over replays of a graph that makes them all.

    Raises RuntimeError for what cannot be captured, and TritonError for what cannot be compiled;
    the next one can be timed all the same.
    """

    def run() -> dict[str, torch.Tensor]:
        for call in calls:
            call()
        return {}

    graph = CudaCapture(torch.device("cuda", torch.cuda.current_device()))(run, dict)
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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Rows of one step: each request has start keys, a run, and a chain of draft nodes."""

    name: str
    requests: int
    start: int
    run_len: int = 1
    nodes: int = 0
    straggler: int = 0  # keys of the last request; 0: as many as of the others

    @property
    def rows(self) -> int:
        return self.requests * (self.run_len + self.nodes)

    @property
    def starts(self) -> list[int]:
        return [self.start] * (self.requests - 1) + [self.straggler or self.start]

    @property
    def slots(self) -> int:
        """KV slots of all requests."""
        return sum(self.starts) + self.rows


def make_plan(load: Workload, device: str = "cpu") -> AttentionPlan:
    """Requests side by side in the pool, slots of each in a random order."""
    step, table = _step(load)
    return _plan(step, table, device)


def make_padded_plan(load: Workload, device: str) -> tuple[AttentionPlan, int]:
    """The plan as an engine runs it, padded to its bucket if it has one, and its number of rows."""
    step, table = _step(load)
    bucket = Buckets(max_rows=MemoryConfig().graph_rows).bucket(step)
    if bucket is None:
        return _plan(step, table, device), load.rows
    padded = step.padded(rows=bucket.rows, entries=bucket.rows, nodes=bucket.nodes)
    return _plan(padded, table, device), bucket.rows


def _step(load: Workload) -> tuple[StepArrays, torch.Tensor]:
    """The step's arrays, and req_to_token."""
    starts_B = np.array(load.starts, dtype=np.int32)
    contexts_B = starts_B + load.run_len
    lens_B = contexts_B + load.nodes
    table = torch.zeros(load.requests, int(lens_B.max()), dtype=torch.int32)
    ends = lens_B.cumsum()
    for row, length, end in zip(table, lens_B.tolist(), ends.tolist(), strict=True):
        row[:length] = torch.randperm(length) + end - length
    nodes = contexts_B[:, None] + np.arange(load.nodes)
    node_slots = table.numpy()[np.arange(load.requests)[:, None], nodes]
    count = np.arange(load.requests + 1, dtype=np.int32)
    zeros_T = np.zeros(load.rows, dtype=np.int64)
    masks = [2 ** (j + 2) - 1 for j in range(load.nodes)] * load.requests
    step = StepArrays(
        input_ids_T=zeros_T,
        positions_T=zeros_T,
        slots_T=zeros_T,
        rows_B=count[:-1],
        starts_B=starts_B,
        run_lens_B=np.full(load.requests, load.run_len, dtype=np.int32),
        q_offsets_B1=count * (load.run_len + load.nodes),
        node_offsets_B1=count * load.nodes,
        node_masks_N=np.array(masks, dtype=np.int64),
        node_slots_N=node_slots.ravel(),
        sampled_R=zeros_T[:0],
    )
    return step, table


def _plan(step: StepArrays, table: torch.Tensor, device: str) -> AttentionPlan:
    inputs = upload(step, torch.device(device))
    return attention_plan(vars(inputs), table.to(device))
