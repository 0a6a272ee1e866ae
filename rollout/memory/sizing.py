"""How many KV slots a memory budget holds."""

from __future__ import annotations

import psutil
import torch

from rollout.config import MemoryConfig
from rollout.errors import OutOfMemoryError
from rollout.memory.kv_pool import KvPool
from rollout.models.spec import ModelSpec


def num_kv_slots(
    config: MemoryConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    draft_slot_bytes: int = 0,
    draft_bytes: int = 0,
) -> int:
    """Slots that fit ``kv_bytes``, else ``kv_fraction`` of what is free on the device now.

    ``draft_slot_bytes``: what drafts keep for each of the target's slots; ``draft_bytes``: whatever
    the number of those.

    Raises OutOfMemoryError when not even two tokens fit.
    """
    slot_bytes = draft_slot_bytes + KvPool.bytes_per_slot(
        num_layers=len(spec.attention_layers),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
    )
    budget = config.kv_bytes
    if budget is None:
        budget = int(_free_bytes(device) * config.kv_fraction)
    slots = max(0, budget - draft_bytes) // slot_bytes
    if config.max_kv_tokens is not None:
        slots = min(slots, config.max_kv_tokens)
    if slots < 2:
        raise OutOfMemoryError(
            f"memory.kv_bytes={budget} holds {slots} tokens of {slot_bytes} bytes: give it "
            f"{slot_bytes} bytes for each token of your longest request, and for two at least"
            + (f", and {draft_bytes} for the draft's tree nodes" if draft_bytes else "")
        )
    return slots


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading and probing left with torch is free as well
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
