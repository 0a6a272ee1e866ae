"""What a draft's keys and values take, before any model is loaded."""

from __future__ import annotations

from pathlib import Path

from rollout.config import ModelConfig
from rollout.memory.kv_pool import KvPool
from rollout.models.checkpoint import Checkpoint
from rollout.models.draft_model import DraftSpec
from rollout.models.dtype import resolve_dtype
from rollout.models.loader import resolve_device
from rollout.models.spec import ModelSpec


def draft_slot_bytes(
    config: ModelConfig, target: ModelSpec, draft: DraftSpec, num_pools: int = 1
) -> int:
    """Bytes for each of the target's KV slots, of all pools of the draft.

    A draft has the target's dtype.
    """
    stored = target.dtype or Checkpoint(Path(config.path)).dtype
    return num_pools * KvPool.bytes_per_slot(
        num_layers=draft.num_layers,
        num_kv_heads=draft.num_kv_heads,
        head_dim=draft.head_dim,
        dtype=resolve_dtype(config.dtype, stored, resolve_device(config.device)),
    )
