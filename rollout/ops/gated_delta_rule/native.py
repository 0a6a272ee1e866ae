"""The gated delta rule on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops import extension
from rollout.ops.extension import DTYPE_CODES, cpu
from rollout.ops.state_plan import StatePlan

__all__ = ["gated_delta_rule", "supports"]


def supports(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TGV: torch.Tensor,
    log_decay_TG: torch.Tensor,
    beta_TG: torch.Tensor,
    states_SGKV: torch.Tensor,
) -> bool:
    return (
        extension.supports(q_THK, k_THK, v_TGV)
        and extension.supports(log_decay_TG, beta_TG, states_SGKV)
        and states_SGKV.dtype is torch.float32
        and states_SGKV[0].is_contiguous()
    )


def gated_delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TGV: torch.Tensor,
    log_decay_TG: torch.Tensor,
    beta_TG: torch.Tensor,
    states_SGKV: torch.Tensor,
    plan: StatePlan,
) -> torch.Tensor:
    out_TGV = torch.empty_like(v_TGV, memory_format=torch.contiguous_format)
    cpu.gated_delta_rule(
        DTYPE_CODES[q_THK.dtype],
        q_THK.data_ptr(),
        q_THK.shape,
        q_THK.stride(),
        k_THK.data_ptr(),
        k_THK.shape,
        k_THK.stride(),
        v_TGV.data_ptr(),
        v_TGV.shape,
        v_TGV.stride(),
        log_decay_TG.data_ptr(),
        log_decay_TG.shape,
        log_decay_TG.stride(),
        beta_TG.data_ptr(),
        beta_TG.shape,
        beta_TG.stride(),
        states_SGKV.data_ptr(),
        states_SGKV.shape,
        states_SGKV.stride(0),
        plan.sources_B.numel(),
        plan.q_offsets_B1.data_ptr(),
        plan.sources_B.data_ptr(),
        plan.parents_T.data_ptr(),
        plan.parents_T.numel(),
        plan.targets_T.data_ptr(),
        plan.targets_T.numel(),
        out_TGV.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TGV
