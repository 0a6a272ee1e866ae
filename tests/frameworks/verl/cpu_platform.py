"""A platform that lets verl train on a CPU: VERL_USE_EXTERNAL_MODULES=cpu_platform.

verl asks Ray for GPUs whatever the platform; start Ray with as many pretended ones as workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from ray._private import services
from ray_sessions import patient
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform


class CpuDevice(ModuleType):
    """The calls of torch.cuda that verl makes, answered by torch.cpu without memory of its own."""

    def __init__(self) -> None:
        super().__init__("cpu_device")

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("memory_", "max_memory_")):
            return lambda *_, **__: 0
        if name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device"):
            return lambda *_, **__: None
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 1 << 34, 1 << 34

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, *_: Any) -> str:
        return "cpu"


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuDevice()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def cudart(self) -> None: ...


def _use_one_gloo_backend() -> None:
    """verl asks for one backend for the CPU and one for the device; torch refuses the CPU twice."""
    import verl.utils.distributed as distributed

    initialize = distributed.initialize_global_process_group_ray

    def initialize_with_gloo(timeout_second: int | None = None, backend: str | None = None) -> None:
        initialize(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_with_gloo


set_platform(CpuPlatform())
_use_one_gloo_backend()
vars(services).update(patient(services))
