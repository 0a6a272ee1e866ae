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
    head g // (G // H). Keys and queries are normalised to length one (epsilon 1e-6 under the root);
    queries are then scaled by K^-0.5. Everything is float32; only o is rounded. The state after a
    row is written to the row's target. Padding rows give zeros.

    Returns a new contiguous [T, G, V] in the dtype of v. Raises ValueError or IndexError if the
    plan contradicts itself or names a row or slot that does not exist; on a GPU nothing checks
    that.

    Args:
        q_THK, k_THK, v_TGV: of one dtype; may be strided, with contiguous elements of a head.
        log_decay_TG: float32 natural logarithms, <= 0.
        beta_TG, states_SGKV: float32.
        chunks: made from the plan; long runs are then computed in chunks, which is faster on a GPU
            and differs in the last bits.
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
