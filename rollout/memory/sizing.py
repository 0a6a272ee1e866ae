"""Sizes of the KV cache: its slots, those of layers with a window, and recurrent states, that a
memory budget holds."""

from __future__ import annotations

import psutil
import torch

from rollout.config import MemoryConfig
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.memory.kv_pool import KvPool
from rollout.memory.state_slots import SLOTS_PER_ROW, StateSizes
from rollout.memory.window_slots import WindowSizes
from rollout.models.spec import ModelSpec

_MAX_SLOTS_OF_CPU = 1 << 18
_MAX_SLOTS = 1 << 22
_FRACTION_OF_CPU = 0.5
_FRACTION = 0.85  # drafts' networks and tables of slots are not measured


def free_bytes(device: torch.device) -> int:
    """Free bytes of the device; on the CPU, without swapping."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # blocks that torch caches are free too
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def memory_budget(config: MemoryConfig, device: torch.device, reserved_bytes: int) -> int:
    """Bytes for KV and states: ``kv_bytes``, else ``kv_fraction`` of the device's free bytes.

    ``reserved_bytes``: free bytes that steps will need for other things.
    """
    if config.kv_bytes is not None:
        return config.kv_bytes
    return int(max(0, free_bytes(device) - reserved_bytes) * kv_fraction(config, device.type))


def kv_fraction(config: MemoryConfig, device_type: str) -> float:
    """``memory.kv_fraction``, else the device's default."""
    if config.kv_fraction is not None:
        return config.kv_fraction
    return _FRACTION_OF_CPU if device_type == "cpu" else _FRACTION


def num_kv_slots(
    config: MemoryConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    budget: int,
    *,
    draft_slot_bytes: int = 0,
    routes_slot_bytes: int = 0,
    draft_bytes: int = 0,
    state_bytes: int = 0,
    windows: WindowSizes | None = None,
) -> int:
    """The number of KV slots that fit a budget.

    Args:
        budget: bytes for all of the below and the target's KV.
        draft_slot_bytes: bytes that drafts store for each slot of the target.
        routes_slot_bytes: bytes of experts' routes for each slot.
        draft_bytes: bytes for drafts, independent of the number of slots.
        state_bytes: bytes for recurrent states, independent of the number of slots.
        windows: of layers that have slots of their own.

    Raises OutOfMemoryError if fewer than two tokens fit.
    """
    everywhere, windowed = slot_bytes_of(spec, dtype)
    slot_bytes = draft_slot_bytes + routes_slot_bytes + everywhere
    apart = draft_bytes + state_bytes
    if windows is None:
        slot_bytes += windowed
    else:
        apart += windowed * (windows.num_slots + 1)
    usual = _MAX_SLOTS_OF_CPU if device.type == "cpu" else _MAX_SLOTS
    left, slots = budget - apart, config.max_kv_tokens or usual
    if slot_bytes or left < 0:  # else all layers have a window, and their pool fits
        slots = min(slots, max(0, left) // max(1, slot_bytes))
    if slots < 2:
        raise OutOfMemoryError(
            f"memory.kv_bytes={budget} holds {slots} tokens of {slot_bytes} bytes: give it "
            f"{slot_bytes} bytes for each token of your longest request, and for two at least"
            + (f", and {draft_bytes} for the draft's tree nodes" if draft_bytes else "")
            + (f", and {state_bytes} for recurrent states" if state_bytes else "")
            + (f", and {apart - draft_bytes - state_bytes} for windows" if windows else "")
            + ("; fewer need a lower memory.window_slots" if windows else "")
            + ("; fewer states need a lower scheduler.max_running" if state_bytes else "")
            + (" or memory.state_slots" if state_bytes and config.state_slots is not None else "")
        )
    return slots


def slot_bytes_of(spec: ModelSpec, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a token's keys and values in layers that see all tokens, and in those with a
    window."""
    of_layer = KvPool.bytes_per_slot(
        num_layers=1,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        has_values=spec.latent is None,
        dtype=dtype,
    )
    windowed = 0 if spec.window is None else len(spec.local_layers)
    return of_layer * (len(spec.attention_layers) - windowed), of_layer * windowed


SPANS_PER_REQUEST = 2
"""Windows per request when all run: its own, and that of a cached prefix."""


def window_sizes(
    config: MemoryConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    max_running: int,
    chunk_len: int,
    budget: int,
    other_slot_bytes: int = 0,
) -> WindowSizes | None:
    """``memory.window_slots``, or a default from the budget. None: layers with a window have the
    slots of all layers.

    The default is two windows, with draft nodes, for each request that may run, and room for a
    chunk; but not more than half as many slots as the budget then holds for other layers. There is
    no pool where the context is no longer than two windows, or where it would hold less than that.

    Args:
        chunk_len: most tokens of a request's run in a step.
        budget: bytes for KV.
        other_slot_bytes: bytes stored for each KV slot beside the target's keys and values.

    Raises InvalidInputError for too few.
    """
    if spec.window is None or config.window_slots == 0:
        return None
    span = WindowSizes(num_slots=0, window=spec.window).span
    slots = config.window_slots
    if slots is None:
        everywhere, windowed = slot_bytes_of(spec, dtype)
        wished = SPANS_PER_REQUEST * max_running * (span + NODES_PER_REQUEST) + chunk_len
        beside = 2 * (everywhere + other_slot_bytes)
        slots = min(wished, (budget - windowed) // (beside + windowed))  # and the null slot
        if min(slots, spec.max_context_len) <= 2 * span:
            return None
    if slots < span:
        raise InvalidInputError(
            "memory.window_slots", slots,
            f"must be 0, or at least {span}: a request holds {span} for a window of {spec.window}",
        )  # fmt: skip
    return WindowSizes(num_slots=slots, window=spec.window)


NODES_PER_REQUEST = 8
"""Draft nodes per request with a state slot when all requests run; fewer requests have more."""

CHECKPOINTS_PER_REQUEST = 2
"""States of cached prefixes per request, for example at its prompt's end and where it ended."""

BUDGET_SHARE = 0.5
"""The largest share of the bytes for KV and states that states may take by default."""


def state_sizes(memory: MemoryConfig, max_running: int, slot_bytes: int, budget: int) -> StateSizes:
    """``memory.state_slots``, or a default from the budget.

    The default is two slots for each request that may run and for one to score, plus slots for
    draft nodes and checkpoints as far as `BUDGET_SHARE` of the budget holds them.

    Args:
        slot_bytes: bytes of one state of all layers.
        budget: bytes for KV slots and states together.
    """
    slots = memory.state_slots
    if slots is None:
        needed = SLOTS_PER_ROW * (max_running + 1)
        wished = max_running * (NODES_PER_REQUEST + CHECKPOINTS_PER_REQUEST)
        affordable = int(budget * BUDGET_SHARE) // slot_bytes - needed
        slots = needed + min(wished, max(0, affordable))
    return StateSizes(num_slots=slots, interval=memory.state_interval)
