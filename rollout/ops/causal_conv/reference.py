"""The short convolution in plain torch, row by row: a state is a window over the inputs."""

from __future__ import annotations

import torch

from rollout.ops.state_plan import StatePlan


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_SCw: torch.Tensor,
    plan: StatePlan,
) -> torch.Tensor:
    y_TC = torch.zeros_like(x_TC, memory_format=torch.contiguous_format)
    state_Cw = torch.empty(0)  # after the row before
    for row, before, target in plan.rows():
        if before is not None:
            state_Cw = states_SCw[before] if before else torch.zeros_like(states_SCw[0])
        window_CW = torch.cat((state_Cw, x_TC[row].unsqueeze(1)), dim=1)
        sum_C = torch.zeros_like(x_TC[0], dtype=torch.float32) if bias_C is None else bias_C.float()
        for tap in range(weight_CW.shape[1]):
            sum_C = sum_C + window_CW[:, tap].float() * weight_CW[:, tap].float()
        y_TC[row] = torch.nn.functional.silu(sum_C).to(x_TC.dtype)
        state_Cw = window_CW[:, 1:]
        if target:
            states_SCw[target] = state_Cw
    return y_TC
