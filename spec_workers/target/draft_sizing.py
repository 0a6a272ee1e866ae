"""The bytes of a draft's keys and values, before any model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout.config import EngineConfig, MemoryConfig
from rollout.memory.kv_pool import KvPool
from rollout.models.checkpoint import Checkpoint
from rollout.models.draft_model import DraftSpec
from rollout.models.loader import resolve_device, resolve_dtype
from rollout.models.spec import ModelSpec
from rollout.ops import gpu
from rollout.parallel import local_rank
from rollout.scheduler.step_limits import StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBytes:
    """The bytes of all pools of a draft."""

    per_slot: int  # of the target's KV
    apart: int  # for tree nodes and what a request has for itself, however many slots there are


NO_DRAFT = DraftBytes(per_slot=0, apart=0)


def draft_bytes(
    config: EngineConfig,
    target: ModelSpec,
    draft: DraftSpec,
    *,
    num_pools: int = 1,
    slots_per_request: int,
) -> DraftBytes:
    """The bytes of a draft's KV, whose dtype is the target's.

    ``slots_per_request``: beside those at the target's slots, of all pools together.
    """
    device = resolve_device(config.model.device, local_rank(config.parallel))
    stored = target.dtype or Checkpoint(Path(config.model.path)).dtype
    each = KvPool.bytes_per_slot(
        num_layers=draft.decoder.num_layers,
        num_kv_heads=draft.decoder.num_kv_heads,
        head_dim=draft.decoder.head_dim,
        has_values=draft.decoder.latent is None,
        dtype=resolve_dtype(config.model.dtype, stored, device),
    )
    limits = StepLimits.of(
        config.scheduler,
        gpu.total_bytes(device),
        recurrent=target.linear_attention is not None,
    )
    rows = limits.max_running + 1  # and one to score with
    return DraftBytes(per_slot=num_pools * each, apart=rows * slots_per_request * each)


def draft_graph_bytes(config: MemoryConfig) -> int:
    """The part of ``memory.graph_bytes`` that a neural draft's graphs have for themselves: forwards
    come first, and would take all of it."""
    return config.graph_bytes // 8
