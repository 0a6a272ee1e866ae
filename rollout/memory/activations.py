"""What a step takes beside weights and KV: measured before KV is sized.

Legend: T query rows, R rows that are sampled from.
"""

from __future__ import annotations

import torch

from rollout.attention import PagedAttention
from rollout.errors import OutOfMemoryError
from rollout.memory.kv_pool import KvPool
from rollout.models.causal_lm import CausalLM
from rollout.ops import gpu
from rollout.ops.paged_attention import AttentionPlan


def activation_bytes(model: CausalLM, *, rows: int, sampled: int) -> int:
    """Bytes that a step of so many query rows takes on a GPU, ``sampled`` of them sampled from.

    It also compiles and loads what such a step runs, whose memory then counts as taken. On the CPU
    and for models with recurrent layers 0: nothing is measured. Raises OutOfMemoryError.
    """
    device = model.device
    if device.type != "cuda" or model.spec.linear_attention is not None:
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        with gpu.on(device):
            run_padding(model, rows=rows, sampled=sampled)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"a step of {rows} query rows, {sampled} of them sampled from, does not fit {device} "
            "beside the weights: lower scheduler.max_step_tokens or scheduler.max_running"
        ) from error
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@torch.inference_mode()
def run_padding(model: CausalLM, *, rows: int, sampled: int) -> torch.Tensor:
    """A step of padding rows alone. Its logits, float32 [R, V]; sampling has two such copies."""
    spec, device = model.spec, model.device
    pool = KvPool(
        num_layers=len(spec.attention_layers),
        num_slots=1,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=model.dtype,
        device=device,
    )
    zeros_T = torch.zeros(rows, dtype=torch.int64, device=device)
    attention = PagedAttention(
        keys=pool.keys,
        values=pool.values,
        slots_T=zeros_T,
        plan=_plan_of_nothing(device),
        scale=spec.head_dim**-0.5,
    )
    hidden_TE = model.forward(zeros_T, zeros_T, attention)
    logits_RV = model.logits(hidden_TE[:sampled]).to(torch.float32, copy=True)
    return logits_RV.clone()


def _plan_of_nothing(device: torch.device) -> AttentionPlan:
    none = torch.zeros(0, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    return AttentionPlan(
        req_to_token=zero[None],
        rows_B=none,
        q_offsets_B1=zero,
        starts_B=none,
        run_lens_B=none,
        node_offsets_B1=zero,
        node_masks_N=none.long(),
        node_slots_N=none,
    )
