"""Steps of like requests, as attention sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollout.config import MemoryConfig
from rollout.ops.paged_attention import AttentionPlan
from rollout.runner.batch_layout import StepArrays, attention_plan
from rollout.runner.graphs import Buckets
from rollout.runner.transfers import upload


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
    return _plan(step, table, step.longest, device)


def make_padded_plan(load: Workload, device: str) -> tuple[AttentionPlan, int]:
    """As an engine runs it: padded to its bucket where it has one. And the number of rows."""
    step, table = _step(load)
    bucket = Buckets(max_rows=MemoryConfig().graph_rows, max_context_len=131_072).bucket(step)
    if bucket is None:
        return _plan(step, table, step.longest, device), load.rows
    padded = step.padded(rows=bucket.rows, entries=bucket.entries, nodes=bucket.nodes)
    return _plan(padded, table, bucket.longest, device), bucket.rows


def _step(load: Workload) -> tuple[StepArrays, torch.Tensor]:
    """And req_to_token."""
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
        longest=int(contexts_B.max()),
    )
    return step, table


def _plan(step: StepArrays, table: torch.Tensor, longest: int, device: str) -> AttentionPlan:
    inputs = upload(step, torch.device(device))
    return attention_plan(vars(inputs), table.to(device), longest)
