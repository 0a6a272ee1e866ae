"""The target's memory: slots of each kind, and what they hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rollout.config import EngineConfig, MemoryConfig
from rollout.errors import InvalidInputError
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.kv_pool import KvPool
from rollout.memory.routes_pool import RoutesPool
from rollout.memory.sizing import (
    free_bytes,
    kv_fraction,
    memory_budget,
    num_kv_slots,
    state_sizes,
    window_sizes,
)
from rollout.memory.state_pool import StatePool
from rollout.memory.state_slots import StateSizes
from rollout.memory.window_slots import WindowSizes
from rollout.models.causal_lm import CausalLM
from rollout.models.experts_config import ExpertsSpec
from rollout.models.spec import ModelSpec
from rollout.parallel import RankGroup
from rollout.runner.dummy_run import DummyRun
from rollout.runner.memory_regions import MemoryRegions
from rollout.runner.memory_saver import MemoryPool
from rollout.runner.profile_run import activation_bytes, warm_up
from rollout.scheduler.step_limits import StepLimits
from rollout.types import MemoryTag
from spec_workers.target.draft_sizing import DraftBytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMemory:
    """The index of the target's memory, and its pools."""

    index: KVCacheManager  # who owns which slot
    kv_pool: KvPool
    state_pool: StatePool | None  # of targets with recurrent layers

    @property
    def pools(self) -> Sequence[MemoryPool]:
        """The device's memory that is given back with the KV cache."""
        return [pool for pool in (self.kv_pool, self.state_pool) if pool is not None]

    @property
    def host_pools(self) -> Sequence[MemoryPool]:
        """The host's memory that is given back with the KV cache."""
        return [] if self.index.routes is None else [self.index.routes]


def target_memory(
    config: EngineConfig,
    limits: StepLimits,
    model: CausalLM,
    ranks: RankGroup,
    *,
    regions: MemoryRegions,
    draft_bytes: DraftBytes,
    reserved_bytes: int,
) -> TargetMemory:
    """The target's memory. Ranks that run one model get equally many slots, as they schedule alike.

    Args:
        regions: that the pools are made in.
        draft_bytes: the bytes that a draft's keys and values are going to take.
        reserved_bytes: the part of the free memory that steps need.

    Raises OutOfMemoryError where nothing could run, InvalidInputError for routes of a model without
    experts.
    """
    spec, dtype, device = model.spec, model.dtype, model.device
    budget = min(ranks.all_gather_int(memory_budget(config.memory, device, reserved_bytes)))
    states, state_bytes = _states(config, limits.max_running, spec, dtype, budget)
    routes = routes_spec(config, spec)
    routes_bytes = 0 if routes is None else RoutesPool.bytes_per_slot(routes)
    routes_bytes = routes_bytes if device.type == "cpu" else 0  # they are on the host

    def slots_beside(windows: WindowSizes | None) -> int:
        slots = num_kv_slots(
            config.memory,
            spec,
            dtype,
            device,
            budget,
            draft_slot_bytes=draft_bytes.per_slot,
            routes_slot_bytes=routes_bytes,
            draft_bytes=draft_bytes.apart,
            state_bytes=state_bytes,
            windows=windows,
        )
        return min(ranks.all_gather_int(slots))

    windows = window_sizes(
        config.memory,
        spec,
        dtype,
        max_running=limits.max_running,
        chunk_len=min(limits.chunk_len, limits.max_step_tokens),
        budget=max(0, budget - draft_bytes.apart),
        other_slot_bytes=draft_bytes.per_slot + routes_bytes,
    )
    sizes = ranks.all_gather_int(0 if windows is None else windows.num_slots)
    if windows is not None:
        windows = replace(windows, num_slots=min(sizes)) if min(sizes) else None
    num_slots = slots_beside(windows)
    if windows is not None and num_slots <= windows.num_slots:  # nothing is saved
        windows, num_slots = None, slots_beside(None)
    index = KVCacheManager(
        num_slots,
        limits.max_running + 1,  # scoring borrows one between steps
        spec.max_context_len,
        config.memory.prefix_cache,
        states,
        None if routes is None else RoutesPool(routes, num_slots),
        windows,
    )
    state_pool = None
    with regions.region(MemoryTag.KV_CACHE):
        kv_pool = KvPool(
            num_layers=len(spec.attention_layers),
            num_slots=num_slots,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            has_values=spec.latent is None,
            window_layers=spec.local_layers,
            num_window_slots=None if windows is None else windows.num_slots,
            dtype=dtype,
            device=device,
        )
        if spec.linear_attention is not None and states is not None:
            state_pool = StatePool(
                spec.linear_attention, num_slots=states.num_slots, dtype=dtype, device=device
            )
    return TargetMemory(index=index, kv_pool=kv_pool, state_pool=state_pool)


def bytes_of_steps(
    memory: MemoryConfig, limits: StepLimits, steps: DummyRun, draft_nodes: int
) -> int:
    """The bytes that steps and graphs will need on a GPU, where KV is sized by free memory; else 0.

    On a GPU this compiles all kernels that they run. ``draft_nodes``: most of a request in one
    step.
    """
    device = steps.model.device
    if device.type != "cuda":
        return 0
    nodes = limits.max_running * draft_nodes
    rows = limits.max_step_tokens + nodes
    scored = min(limits.chunk_len, limits.max_step_tokens)
    sampled = max(limits.max_running + nodes, scored)
    warm_up(steps, rows=rows, sampled=sampled)
    if memory.kv_bytes is not None:
        return 0
    activations = activation_bytes(steps, rows=rows, sampled=sampled)
    log.info(
        "%s: %d MiB are free beside the weights; a step takes up to %d MiB of them, CUDA "
        "graphs %d MiB, KV %.0f %% of the rest",
        device,
        free_bytes(device) >> 20,
        activations >> 20,
        memory.graph_bytes >> 20,
        kv_fraction(memory, device.type) * 100,
    )
    return activations + memory.graph_bytes


def _states(
    config: EngineConfig, max_running: int, spec: ModelSpec, dtype: torch.dtype, budget: int
) -> tuple[StateSizes | None, int]:
    """The sizes of the state slots and their bytes; None and 0 without recurrent layers."""
    if spec.linear_attention is None:
        return None, 0
    each = StatePool.bytes_per_slot(spec.linear_attention, dtype)
    sizes = state_sizes(config.memory, max_running, each, budget)
    return sizes, each * (sizes.num_slots + 1)


def routes_spec(config: EngineConfig, spec: ModelSpec) -> ExpertsSpec | None:
    """The experts whose routes are recorded; None: none. Raises InvalidInputError without
    experts."""
    if not config.model.record_routes:
        return None
    if spec.experts is None:
        raise InvalidInputError(
            "model.record_routes", True, f"{spec.architecture} has no experts: leave it out"
        )
    return spec.experts
