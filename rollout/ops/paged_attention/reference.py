"""Paged attention over runs and draft trees in plain torch: float64, one query row at a time."""

from __future__ import annotations

import torch

from rollout.ops.paged_attention.plan import PLAIN, AttentionPlan, AttentionVariant


def paged_attention(
    q_THD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    variant: AttentionVariant = PLAIN,
) -> torch.Tensor:
    out_THD = q_THD.new_zeros(q_THD.shape)
    for row, slots_L in _slots_by_query_row(plan):
        if variant.window is not None:
            slots_L = slots_L[-variant.window :]
        groups = (k_pool_SKD.shape[1], -1, q_THD.shape[2])
        q_KGD = q_THD[row].double().view(groups)
        k_KLD = k_pool_SKD[slots_L].double().transpose(0, 1)
        v_KLD = v_pool_SKD[slots_L].double().transpose(0, 1)
        scores_KGL = q_KGD @ k_KLD.transpose(1, 2) * scale
        if variant.soft_cap is not None:
            scores_KGL = variant.soft_cap * torch.tanh(scores_KGL / variant.soft_cap)
        if variant.sinks_H is not None:
            sinks_KG1 = variant.sinks_H.double().view(*scores_KGL.shape[:2], 1)
            scores_KGL = torch.cat((scores_KGL, sinks_KG1), dim=-1)
        probs_KGL = torch.softmax(scores_KGL, dim=-1)[..., : len(slots_L)]
        out_THD[row] = (probs_KGL @ v_KLD).reshape(q_THD.shape[1:]).to(q_THD.dtype)
    return out_THD


def _slots_by_query_row(plan: AttentionPlan) -> list[tuple[int, torch.Tensor]]:
    """The query rows, each with the slots of its keys in position order."""
    node_offsets, node_masks = plan.node_offsets_B1.tolist(), plan.node_masks_N.tolist()
    q_offsets = plan.q_offsets_B1.tolist()
    rows: list[tuple[int, torch.Tensor]] = []
    for entry, (row, start, run_len) in enumerate(
        zip(plan.rows_B.tolist(), plan.starts_B.tolist(), plan.run_lens_B.tolist(), strict=True)
    ):
        context = plan.req_to_token[row, : start + run_len].long()
        seen = [context[: start + j + 1] for j in range(run_len)]
        nodes = slice(node_offsets[entry], node_offsets[entry + 1])
        slots = plan.node_slots_N[nodes].long()
        for node, mask in enumerate(node_masks[nodes]):
            path = [k for k in range(node + 1) if mask >> (k + 1) & 1]
            seen.append(torch.cat((context, slots[path])))
        first, last = q_offsets[entry], q_offsets[entry + 1]
        rows += zip(range(first, last), seen[len(seen) - (last - first) :], strict=True)
    return rows
