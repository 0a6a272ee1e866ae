"""The gated delta rule on a GPU: a program per value head and a few of the state's columns takes
entries in turns.

A program runs the entry's rows in order and holds its columns of the state in registers. Columns do
not interact, and states are always float32, so a row's bits depend on its path alone. A row that
does not continue the row before it loads the state that its parent stored. A program has one warp:
every row takes two sums over the key's dimensions, for which several warps would have to wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.ops import gpu
from rollout.ops.gated_delta_rule.reference import EPS
from rollout.ops.state_plan import StatePlan

_ENTRIES = 64  # that run at once: with heads and columns far more programs than a GPU holds
_COLUMNS = 8  # of a program: with a key of 128 dimensions they are 32 registers of a thread


def supports(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_TGV: torch.Tensor,
    log_decay_TG: torch.Tensor,
    beta_TG: torch.Tensor,
    states_SGKV: torch.Tensor,
) -> bool:
    return (
        gpu.supports(q_THK, k_THK, v_TGV)
        and gpu.supports(states_SGKV, log_decay_TG, beta_TG)
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
    _, key_heads, key_dim = q_THK.shape
    rows, heads, value_dim = v_TGV.shape
    out_TGV = torch.empty_like(v_TGV, memory_format=torch.contiguous_format)
    if not out_TGV.numel():
        return out_TGV
    num_entries = plan.sources_B.numel()
    columns = min(_COLUMNS, triton.next_power_of_2(value_dim))
    programs = min(_ENTRIES, num_entries + 1)  # one entry more: the rows of padding
    _gated_delta_rule_kernel[(programs, heads, triton.cdiv(value_dim, columns))](
        q_THK, k_THK, v_TGV, log_decay_TG, beta_TG, states_SGKV, out_TGV,
        plan.q_offsets_B1, plan.sources_B, plan.parents_T, plan.targets_T, num_entries, rows,
        *q_THK.stride()[:2], *k_THK.stride()[:2], *v_TGV.stride()[:2],
        log_decay_TG.stride(0), beta_TG.stride(0), states_SGKV.stride(0),
        heads, heads // key_heads, key_dim, value_dim, key_dim**-0.5,
        EPSILON=EPS, KEYS=triton.next_power_of_2(key_dim), COLUMNS=columns,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out_TGV


@triton.jit
def _unit_length(x_ptrs, inside, EPSILON: tl.constexpr):
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + EPSILON)


@triton.jit(do_not_specialize=["num_entries", "num_rows"])
def _gated_delta_rule_kernel(
    q_ptr, k_ptr, v_ptr, log_decay_ptr, beta_ptr, states_ptr, out_ptr,
    q_offsets_ptr, sources_ptr, parents_ptr, targets_ptr, num_entries, num_rows,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    log_decay_stride, beta_stride, slot_stride, heads, group, key_dim, value_dim, scale,
    EPSILON: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    dim = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_dim, is_column = dim < key_dim, column < value_dim
    inside = is_dim[:, None] & is_column[None, :]
    q_ptr += head // group * q_head_stride + dim
    k_ptr += head // group * k_head_stride + dim
    v_ptr += head * v_head_stride + column
    states_ptr += head * key_dim * value_dim + dim[:, None] * value_dim + column[None, :]
    out_ptr += head * value_dim + column
    for entry in range(tl.program_id(0), num_entries + 1, tl.num_programs(0)):
        is_entry = entry < num_entries
        start = tl.load(q_offsets_ptr + entry)
        end = tl.load(q_offsets_ptr + entry + 1, mask=is_entry, other=num_rows)
        source = tl.load(sources_ptr + entry, mask=is_entry, other=0)
        state = tl.zeros((KEYS, COLUMNS), tl.float32)
        for index in range(start, end):
            row = tl.cast(index, tl.int64)
            parent = tl.load(parents_ptr + row, mask=is_entry, other=-1)
            if (parent < 0) | (parent != index - 1):
                before = source
                if parent >= 0:
                    before = tl.load(targets_ptr + parent)
                tl.debug_barrier()  # what this program has stored is there for all of its threads
                before_ptrs = states_ptr + before.to(tl.int64) * slot_stride
                known = dim < tl.where(before != 0, key_dim, 0)
                known = known[:, None] & is_column[None, :]
                state = tl.load(before_ptrs, mask=known, other=0.0)
            q = _unit_length(q_ptr + row * q_stride, is_dim, EPSILON) * scale
            k = _unit_length(k_ptr + row * k_stride, is_dim, EPSILON)
            v = tl.load(v_ptr + row * v_stride, mask=is_column, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + row * beta_stride + head)
            state *= tl.exp(tl.load(log_decay_ptr + row * log_decay_stride + head))
            delta = (v - tl.sum(state * k[:, None], axis=0)) * beta
            state += k[:, None] * delta[None, :]
            out = tl.sum(state * q[:, None], axis=0)
            out = tl.where(is_entry, out, 0.0)
            out_ptrs = out_ptr + row * heads * value_dim
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_column)
            target = tl.load(targets_ptr + row, mask=is_entry, other=0)
            if target != 0:
                tl.store(states_ptr + target.to(tl.int64) * slot_stride, state, mask=inside)
