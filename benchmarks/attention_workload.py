"""Steps of equal requests, as attention sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.ops.paged_attention import AttentionPlan


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Rows of one step: each request has start keys, a run, and a chain of draft nodes."""

    name: str
    requests: int
    start: int
    run_len: int = 1
    nodes: int = 0

    @property
    def rows(self) -> int:
        return self.requests * (self.run_len + self.nodes)

    @property
    def slots(self) -> int:
        """KV slots of one request."""
        return self.start + self.run_len + self.nodes


def make_plan(load: Workload, device: str = "cpu") -> AttentionPlan:
    """Requests side by side in the pool, slots of each in a random order."""
    order = [b * load.slots + torch.randperm(load.slots) for b in range(load.requests)]
    slots_BS = torch.stack(order).int().to(device)
    count = torch.arange(load.requests + 1, dtype=torch.int32, device=device)
    context = load.start + load.run_len
    masks = [2 ** (j + 2) - 1 for j in range(load.nodes)] * load.requests
    return AttentionPlan(
        req_to_token=slots_BS,
        rows_B=count[:-1],
        q_offsets_B1=count * (load.run_len + load.nodes),
        starts_B=torch.full_like(count[:-1], load.start),
        run_lens_B=torch.full_like(count[:-1], load.run_len),
        node_offsets_B1=count * load.nodes,
        node_masks_N=torch.tensor(masks, dtype=torch.int64, device=device),
        node_slots_N=slots_BS[:, context:].reshape(-1).contiguous(),
    )
