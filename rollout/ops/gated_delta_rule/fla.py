"""flash-linear-attention's chunked kernels, used if installed and in agreement with ours.

Written for version 0.6; not run on a GPU yet. A package whose numbers differ is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from rollout.ops.gated_delta_rule.chunked import (
    MIN_ROWS,
    ChunkedKernel,
    Round,
    chunked_plan,
    torch_kernel,
)
from rollout.ops.state_plan import StatePlan

log = logging.getLogger(__name__)

_TOLERANCE = 0.02  # of the largest number: its matrix products are 16-bit


def chunked_kernel(states_SGKV: torch.Tensor, dtype: torch.dtype) -> ChunkedKernel | None:
    """The kernel for these states and inputs of ``dtype``: theirs, or else `torch_kernel`.

    None on a CPU, where our recurrence is faster because its states are in the cache.
    """
    if not states_SGKV.is_cuda:
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return torch_kernel
    if dtype is torch.float32:  # their matrix products are 16-bit
        return torch_kernel
    theirs = fla_kernel(chunk_gated_delta_rule)
    try:
        return theirs if agrees(theirs, states_SGKV, dtype) else torch_kernel
    except Exception as error:  # any error of another version: ours is always available
        log.warning("flash-linear-attention is installed but not used: %r", error)
        return torch_kernel


def fla_kernel(chunk_gated_delta_rule: Callable[..., Any]) -> ChunkedKernel:
    """A `ChunkedKernel` that calls flash-linear-attention's function."""

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        part: Round,
        states_RGKV: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = v.shape[1] // k.shape[1]
        q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
        out, states = chunk_gated_delta_rule(
            *(x.contiguous().unsqueeze(0) for x in (q, k, v, log_decay, beta)),
            initial_state=states_RGKV,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=part.offsets_R1,
        )
        return out.squeeze(0), states

    return kernel


def agrees(kernel: ChunkedKernel, states_SGKV: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``kernel`` agrees with `torch_kernel` on two sections of different lengths.

    ``states_SGKV``: gives the sizes and the device.
    """
    _, heads, key_dim, value_dim = states_SGKV.shape
    device, generator = states_SGKV.device, torch.Generator().manual_seed(0)
    lengths = (MIN_ROWS + 7, MIN_ROWS + 64)
    rows = sum(lengths)
    offsets = torch.tensor([0, lengths[0], rows], dtype=torch.int32)
    parents, targets = torch.arange(-1, rows - 1), torch.zeros(rows, dtype=torch.int32)
    parents[lengths[0]] = -1
    targets[offsets[1:].long() - 1] = torch.tensor([1, 2], dtype=torch.int32)
    plan = chunked_plan(
        StatePlan(
            q_offsets_B1=offsets,
            sources_B=torch.tensor([0, 3], dtype=torch.int32),
            parents_T=parents.int(),
            targets_T=targets,
        ),
        device,
        kernel,
    )
    assert plan is not None
    (part,) = plan.rounds

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, k, v = (normal(rows, heads, dim).to(dtype) for dim in (key_dim, key_dim, value_dim))
    log_decay, beta = -normal(rows, heads).abs() / 10, normal(rows, heads).sigmoid()
    states = normal(2, heads, key_dim, value_dim)
    expected = torch_kernel(q, k, v, log_decay, beta, part, states)
    found = kernel(q, k, v, log_decay, beta, part, states.clone())
    return all(
        a.shape == b.shape and bool(((a - b).abs().max() <= _TOLERANCE * b.abs().max()).item())
        for a, b in zip(found, expected, strict=True)
    )
