"""Which dtype to compute in."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from rollout.config import DType

_FAST_ON_CPU = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16", "bf16", "sve_bf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16"}),
}


def resolve_dtype(
    requested: DType,
    stored: torch.dtype,
    device: torch.device,
    features: frozenset[str] | None = None,
) -> torch.dtype:
    """AUTO is the checkpoint's dtype, or float32 on a CPU that has no instructions for it.

    ``features`` are the CPU's, named as torch and /proc/cpuinfo name them; None reads them.
    """
    if requested is not DType.auto:
        return getattr(torch, requested.value)
    if stored not in _FAST_ON_CPU:
        return torch.float32
    if device.type != "cpu":
        return stored
    features = cpu_features() if features is None else features
    return stored if features & _FAST_ON_CPU[stored] else torch.float32


def cpu_features() -> frozenset[str]:
    """From torch where its version tells, else from the kernel; empty where neither does."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        return frozenset(name for name, value in capabilities().items() if value is True)
    cpuinfo = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM
            return frozenset(values.split())
    return frozenset()
