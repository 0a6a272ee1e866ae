"""The limits of a step where nothing, or only a part, was configured."""

from __future__ import annotations

import pytest
import torch

from rollout.config import MemoryConfig, SchedulerConfig
from rollout.memory.sizing import kv_fraction, num_kv_slots
from rollout.models.spec import ModelSpec
from rollout.scheduler.step_limits import StepLimits

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GPU_BYTES = 79 << 30


@pytest.mark.parametrize(
    ("gpu_bytes", "configured", "expected"),
    [
        (None, {}, (32, 512, 256)),
        (GPU_BYTES, {}, (256, 2048, 2048)),
        (None, {"max_running": 600}, (600, 600, 256)),
        (GPU_BYTES, {"max_running": 8}, (8, 2048, 2048)),
        (GPU_BYTES, {"max_step_tokens": 100}, (100, 100, 100)),
        (None, {"max_step_tokens": 100}, (32, 100, 100)),
        (None, {"max_step_tokens": 100, "chunk_len": 300}, (32, 100, 300)),
        (GPU_BYTES, {"max_running": 3, "max_step_tokens": 7, "chunk_len": 5}, (3, 7, 5)),
    ],
)
def test_what_is_configured_bounds_what_is_not(gpu_bytes, configured, expected) -> None:
    limits = StepLimits.of(SchedulerConfig(**configured), gpu_bytes)
    assert (limits.max_running, limits.max_step_tokens, limits.chunk_len) == expected


def test_a_gpu_with_less_memory_takes_on_less() -> None:
    gpu_bytes = 47 << 30
    limits = StepLimits.of(SchedulerConfig(), gpu_bytes)
    assert (limits.max_running, limits.max_step_tokens, limits.chunk_len) == (64, 1024, 1024)
    assert StepLimits.of(SchedulerConfig(max_running=300), gpu_bytes).max_step_tokens == 1024


@pytest.mark.parametrize(("gpu_bytes", "max_step_tokens"), [(None, 512), (GPU_BYTES, 2048)])
def test_states_of_recurrent_layers_bound_what_runs(gpu_bytes, max_step_tokens) -> None:
    limits = StepLimits.of(SchedulerConfig(), gpu_bytes, recurrent=True)
    assert (limits.max_running, limits.max_step_tokens) == (32, max_step_tokens)
    assert (
        StepLimits.of(SchedulerConfig(max_running=100), gpu_bytes, recurrent=True).max_running
        == 100
    )


@pytest.mark.parametrize(
    ("device", "most", "expected"),
    [(CPU, None, 262_144), (GPU, None, 4_194_304), (CPU, 1_000_000, 1_000_000), (GPU, 50, 50)],
)
def test_the_kv_cache_is_bounded_by_what_the_device_can_use(
    tiny_model_path, device, most, expected
) -> None:
    memory = MemoryConfig(max_kv_tokens=most)
    spec = ModelSpec.read(tiny_model_path)
    slots = num_kv_slots(memory, spec, torch.float32, device, 1 << 40)
    assert slots == expected


@pytest.mark.parametrize(
    ("device", "configured", "expected"), [(CPU, None, 0.5), (GPU, None, 0.85), (GPU, 0.3, 0.3)]
)
def test_the_share_of_kv_suits_the_device(device, configured, expected) -> None:
    assert kv_fraction(MemoryConfig(kv_fraction=configured), device.type) == expected
