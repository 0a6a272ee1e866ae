"""The limits of a step where nothing, or only a part, was configured."""

from __future__ import annotations

import torch

from rollout.config import MemoryConfig, SchedulerConfig
from rollout.memory.sizing import kv_fraction, num_kv_slots
from rollout.models.spec import ModelSpec
from rollout.scheduler.step_limits import StepLimits

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GPU_BYTES = 79 << 30


def limits_of(gpu_bytes: int | None, recurrent: bool = False, **configured) -> tuple:
    limits = StepLimits.of(SchedulerConfig(**configured), gpu_bytes, recurrent=recurrent)
    return limits.max_running, limits.max_step_tokens, limits.chunk_len


def test_what_is_configured_bounds_what_is_not() -> None:
    for gpu_bytes, configured, expected in (
        (None, {}, (32, 512, 256)),
        (GPU_BYTES, {}, (256, 2048, 2048)),
        (64 << 30, {}, (256, 2048, 2048)),
        ((64 << 30) - 1, {}, (64, 1024, 1024)),
        ((64 << 30) - 1, {"max_running": 300}, (300, 1024, 1024)),
        (None, {"max_running": 600}, (600, 600, 256)),
        (GPU_BYTES, {"max_running": 8}, (8, 2048, 2048)),
        (GPU_BYTES, {"max_step_tokens": 100}, (100, 100, 100)),
        (None, {"max_step_tokens": 100}, (32, 100, 100)),
        (None, {"max_step_tokens": 100, "chunk_len": 300}, (32, 100, 300)),
        (GPU_BYTES, {"max_running": 3, "max_step_tokens": 7, "chunk_len": 5}, (3, 7, 5)),
        (None, {"recurrent": True}, (32, 512, 256)),
        (GPU_BYTES, {"recurrent": True}, (32, 2048, 2048)),
        (GPU_BYTES, {"recurrent": True, "max_running": 100}, (100, 2048, 2048)),
    ):
        assert limits_of(gpu_bytes, **configured) == expected, (gpu_bytes, configured)


def test_the_kv_cache_is_bounded_by_what_the_device_can_use(tiny_model_path) -> None:
    spec = ModelSpec.read(tiny_model_path)
    for device, most, expected in (
        (CPU, None, 262_144), (GPU, None, 4_194_304), (CPU, 1_000_000, 1_000_000), (GPU, 50, 50),
    ):  # fmt: skip
        memory = MemoryConfig(max_kv_tokens=most)
        assert num_kv_slots(memory, spec, torch.float32, device, 1 << 40) == expected
    for device, configured, share in ((CPU, None, 0.5), (GPU, None, 0.85), (GPU, 0.3, 0.3)):
        assert kv_fraction(MemoryConfig(kv_fraction=configured), device.type) == share
