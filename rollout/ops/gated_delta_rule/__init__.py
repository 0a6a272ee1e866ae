"""The recurrent layer of gated delta networks (Yang, Kautz and Hatamizadeh 2024).

Legend: T rows, H key heads of K dims, G value heads of V dims, S slots.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.gated_delta_rule import chunked, native, reference
from rollout.ops.gated_delta_rule.chunked import ChunkedPlan
from rollout.ops.state_plan import StatePlan


def gated_delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TGV: torch.Tensor,
    log_decay_TG: torch.Tensor,
    beta_TG: torch.Tensor,
    states_SGKV: torch.Tensor,
    plan: StatePlan,
    chunks: ChunkedPlan | None = None,
) -> torch.Tensor:
    """``S = decay S'; S += k (beta (v - k^T S))^T; o = q^T S``, row after row along each path.

    S' [K, V] is the state of the row's parent, or of its entry's source. Value head g reads key
    head g // (G // H). Keys and queries are normalised to length one (epsilon 1e-6 under the root),
    queries then scaled by K^-0.5. All of it is in float32, o alone is rounded. The state after a
    row is written to the row's target.

    q_THK, k_THK, v_TGV: one dtype, strided views are fine where elements of a head are adjacent.
    log_decay_TG (natural logarithms, <= 0), beta_TG and states_SGKV: float32. Rows of padding come
    out as zeros. With ``chunks``, made of the plan, long runs are computed in chunks: quicker on a
    GPU, and not the same to the last bit. Returns a new contiguous [T, G, V] in the dtype of v.
    Raises ValueError or IndexError when the plan contradicts itself or names a row or slot that is
    not there; on a GPU nothing checks that.
    """
    if chunks is not None:
        return chunked.gated_delta_rule(
            q_THK,
            k_THK,
            v_TGV,
            log_decay_TG,
            beta_TG,
            states_SGKV,
            chunks,
            recurrent=gated_delta_rule,
        )
    inputs = (q_THK, k_THK, v_TGV, log_decay_TG, beta_TG, states_SGKV)
    if gpu.runs_on(v_TGV.device):
        from rollout.ops.gated_delta_rule import triton

        if triton.supports(*inputs):
            return triton.gated_delta_rule(*inputs, plan)
    if native.supports(*inputs):
        return native.gated_delta_rule(*inputs, plan)
    return reference.gated_delta_rule(*inputs, plan)
