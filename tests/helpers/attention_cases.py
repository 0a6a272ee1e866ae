"""Batches of requests with runs and draft trees, for tests of paged attention.

Pools are NaN wherever no key of the plan is, so a key read by a row that must not see it shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rollout.ops.paged_attention import AttentionPlan, paged_attention
from rollout.ops.transfers import upload
from rollout.runner.batch_layout import StepArrays, attention_plan
from rollout.runner.graphs import Buckets


@dataclass
class Entry:
    """One request of a test batch. parents[j]: tree node that draft node j hangs from (0: root)."""

    start: int
    run_len: int
    parents: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.run_len + len(self.parents)

    def mask(self, node: int) -> int:
        """Ancestor mask of tree node `node`, as types.DraftTrees defines it."""
        return 1 if node == 0 else self.mask(self.parents[node - 1]) | 1 << node


@dataclass
class Request:
    """An entry with its own queries and slots, so that it can be batched in several ways."""

    entry: Entry
    q: torch.Tensor
    slots: list[int]  # by position, the run included
    node_slots: list[int]


@dataclass
class Case:
    requests: list[Request]
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    op: Callable[..., torch.Tensor] = paged_attention

    def run(self, requests: list[Request] | None = None, **kwargs) -> list[torch.Tensor]:
        """Output rows by request."""
        requests = self.requests if requests is None else requests
        q, plan = batch(requests, **kwargs)
        out = self.op(q, self.k_pool, self.v_pool, plan, q.shape[-1] ** -0.5)
        return list(out[: plan.q_offsets_B1[-1]].split([r.entry.num_rows for r in requests]))


def batch(requests: list[Request], padding: int = 0) -> tuple[torch.Tensor, AttentionPlan]:
    longest = max((len(r.slots) for r in requests), default=1)
    table = torch.full((len(requests) + 2, longest + 7), 2**30, dtype=torch.int32)
    rows = list(range(len(requests) + 1, 1, -1))
    for row, request in zip(rows, requests, strict=True):
        table[row, : len(request.slots)] = torch.tensor(request.slots, dtype=torch.int32)

    plan = plan_of([r.entry for r in requests])
    plan.req_to_token, plan.rows_B = table, torch.tensor(rows, dtype=torch.int32)
    node_slots = [s for r in requests for s in r.node_slots]
    plan.node_slots_N = torch.tensor(node_slots, dtype=torch.int32)
    q = torch.cat([r.q for r in requests]) if requests else torch.empty(0, 3, 8)
    return torch.cat((q, q.new_full((padding, *q.shape[1:]), torch.nan))), plan


def plan_of(entries: list[Entry]) -> AttentionPlan:
    """A plan for the entries whose keys are all in slot 0."""

    def offsets(counts: list[int]) -> torch.Tensor:
        return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    masks = [e.mask(j + 1) for e in entries for j in range(len(e.parents))]
    return AttentionPlan(
        req_to_token=torch.zeros(1, 1, dtype=torch.int32),
        rows_B=torch.zeros(len(entries), dtype=torch.int32),
        q_offsets_B1=offsets([e.num_rows for e in entries]),
        starts_B=torch.tensor([e.start for e in entries], dtype=torch.int32),
        run_lens_B=torch.tensor([e.run_len for e in entries], dtype=torch.int32),
        node_offsets_B1=offsets([len(e.parents) for e in entries]),
        node_masks_N=torch.tensor(
            [m - 2**64 if m >= 2**63 else m for m in masks], dtype=torch.int64
        ),
        node_slots_N=torch.zeros(len(masks), dtype=torch.int32),
    )


PLACED = (
    "rows_B", "q_offsets_B1", "starts_B", "run_lens_B", "node_offsets_B1", "node_masks_N",
    "node_slots_N",
)  # fmt: skip


def on(device: torch.device, plan: AttentionPlan) -> AttentionPlan:
    placed = {name: getattr(plan, name).to(device) for name in ("req_to_token", *PLACED)}
    return AttentionPlan(**placed)


def engine_step(q: torch.Tensor, plan: AttentionPlan) -> tuple[torch.Tensor, AttentionPlan]:
    """The step padded to its bucket, as a forward is captured; queries of padding are NaN."""
    rows_T = np.zeros(int(plan.q_offsets_B1[-1]), dtype=np.int64)
    step = StepArrays(
        input_ids_T=rows_T, positions_T=rows_T, slots_T=rows_T, sampled_R=rows_T[:0],
        **{name: getattr(plan, name).numpy() for name in PLACED},
    )  # fmt: skip
    bucket = Buckets(max_rows=256).bucket(step)
    assert bucket is not None
    padded = step.padded(rows=bucket.rows, entries=bucket.rows, nodes=bucket.nodes)
    inputs = upload(padded, torch.device("cpu"))
    padded_q = torch.cat((q, q.new_full((bucket.rows - len(q), *q.shape[1:]), torch.nan)))
    return padded_q, attention_plan(vars(inputs), plan.req_to_token)


def make_case(
    entries: list[Entry],
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    used = sum(e.start + e.num_rows for e in entries)
    free = torch.randperm(2 * used, generator=generator)[:used].tolist()
    pools = torch.full((2, 2 * used, kv_heads, head_dim), torch.nan, dtype=dtype)
    pools[:, free] = normal(2, used, kv_heads, head_dim)
    requests = []
    for entry in entries:
        taken = [free.pop() for _ in range(entry.start + entry.num_rows)]
        cut = entry.start + entry.run_len
        q = normal(entry.num_rows, heads, head_dim)
        requests.append(Request(entry, q, taken[:cut], taken[cut:]))
    return Case(requests, *pools)


def case_on(
    device: torch.device, entries: list[Entry], *shape, op: Callable = paged_attention
) -> Case:
    """A case whose op runs on ``device``: inputs are moved there, and the output back. ``shape``:
    see `make_case`."""

    def run(q, k_pool, v_pool, plan, scale):
        q, k_pool, v_pool = (tensor.to(device) for tensor in (q, k_pool, v_pool))
        return op(q, k_pool, v_pool, on(device, plan), scale).cpu()

    return replace(make_case(entries, *shape), op=run)


def random_tree(rng: random.Random, nodes: int) -> list[int]:
    return [rng.randint(max(0, j - 4), j) for j in range(nodes)]


def random_entries(seed: int, count: int) -> list[Entry]:
    rng = random.Random(seed)
    entries = []
    for _ in range(count):
        start = rng.choice([0, 1, 15, 16, 63, 64, 65, rng.randint(0, 300)])
        run_len = rng.choice([1, 1, 1, 2, 5, 17, rng.randint(1, 80)])
        nodes = rng.choice([0, 0, 1, 3, 8, 20, 63])
        entries.append(Entry(start, run_len, random_tree(rng, nodes)))
    return entries


def assert_bitwise(left: torch.Tensor, right: torch.Tensor) -> None:
    bits = torch.int32 if left.dtype is torch.float32 else torch.int16
    assert torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def decode_one_by_one(case: Case, q: torch.Tensor, slots: list[int], start: int) -> torch.Tensor:
    """Plain decoding: the row at each position from `start` on, in a step of its own."""
    return torch.cat(
        [
            case.run([Request(Entry(start + j, 1), q[j : j + 1], slots[: start + j + 1], [])])[0]
            for j in range(len(q))
        ]
    )
