"""Scatter this step's keys and values into their slots, in plain torch."""

from __future__ import annotations

import torch


def store_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_pool_SKD: torch.Tensor,
    v_pool_SKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    slots_T = slots_T.long()
    k_pool_SKD[slots_T] = k_TKD
    v_pool_SKD[slots_T] = v_TKD
