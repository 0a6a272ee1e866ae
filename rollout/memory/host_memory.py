"""Free memory of a device, and returning freed memory to the system."""

from __future__ import annotations

import ctypes

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Free bytes of the device; on the CPU, without swapping."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # blocks that torch caches are free too
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def return_freed_memory() -> None:
    """Return freed pages to the operating system, and cached blocks to other users of the GPU.

    Allocators retain freed memory: glibc all but the largest blocks, torch's CUDA allocator all of
    it.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
