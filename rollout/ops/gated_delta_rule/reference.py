"""The gated delta rule in plain torch, row by row (Yang, Kautz and Hatamizadeh 2024, eq. 10)."""

from __future__ import annotations

import torch

from rollout.ops.state_plan import StatePlan

EPS = 1e-6  # of a key's and a query's squared length


def gated_delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TGV: torch.Tensor,
    log_decay_TG: torch.Tensor,
    beta_TG: torch.Tensor,
    states_SGKV: torch.Tensor,
    plan: StatePlan,
) -> torch.Tensor:
    group = v_TGV.shape[1] // k_THK.shape[1]
    q_TGK = (unit_length(q_THK) * q_THK.shape[2] ** -0.5).repeat_interleave(group, dim=1)
    k_TGK = unit_length(k_THK).repeat_interleave(group, dim=1)
    out_TGV = torch.zeros_like(v_TGV, memory_format=torch.contiguous_format)
    state_GKV = torch.empty(0)  # after the row before
    for row, before, target in plan.rows():
        if before is not None:
            state_GKV = states_SGKV[before] if before else torch.zeros_like(states_SGKV[0])
        q_GK1, k_GK1 = q_TGK[row].unsqueeze(2), k_TGK[row].unsqueeze(2)
        state_GKV = state_GKV * log_decay_TG[row].exp().view(-1, 1, 1)
        recalled_GV = (state_GKV * k_GK1).sum(dim=1)
        delta_GV = (v_TGV[row].float() - recalled_GV) * beta_TG[row].unsqueeze(1)
        state_GKV = state_GKV + k_GK1 * delta_GV.unsqueeze(1)
        out_TGV[row] = (state_GKV * q_GK1).sum(dim=1).to(v_TGV.dtype)
        if target:
            states_SGKV[target] = state_GKV
    return out_TGV


def unit_length(x_THK: torch.Tensor) -> torch.Tensor:
    """Vectors normalised to length one, float32."""
    x = x_THK.float()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPS)
