"""The short convolution on CPU tensors."""

from __future__ import annotations

import torch

from rollout.ops import extension
from rollout.ops.extension import DTYPE_CODES, cpu
from rollout.ops.state_plan import StatePlan

__all__ = ["causal_conv", "supports"]


def supports(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_SCw: torch.Tensor,
) -> bool:
    tensors = (x_TC, weight_CW) if bias_C is None else (x_TC, weight_CW, bias_C)
    return (
        extension.supports(*tensors)
        and weight_CW.is_contiguous()
        and states_SCw.is_cpu
        and states_SCw.dtype is x_TC.dtype
        and states_SCw[0].is_contiguous()
    )


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_SCw: torch.Tensor,
    plan: StatePlan,
) -> torch.Tensor:
    y_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    cpu.causal_conv(
        DTYPE_CODES[x_TC.dtype],
        x_TC.data_ptr(),
        x_TC.shape,
        x_TC.stride(),
        weight_CW.data_ptr(),
        weight_CW.shape,
        0 if bias_C is None else bias_C.data_ptr(),
        0 if bias_C is None else bias_C.numel(),
        states_SCw.data_ptr(),
        states_SCw.shape,
        states_SCw.stride(0),
        plan.sources_B.numel(),
        plan.q_offsets_B1.data_ptr(),
        plan.sources_B.data_ptr(),
        plan.parents_T.data_ptr(),
        plan.parents_T.numel(),
        plan.targets_T.data_ptr(),
        plan.targets_T.numel(),
        y_TC.data_ptr(),
        torch.get_num_threads(),
    )
    return y_TC
