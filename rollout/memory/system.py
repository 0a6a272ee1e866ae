"""Memory that is free, and from memory the process has freed to memory others can use."""

from __future__ import annotations

import ctypes

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Free bytes of the device, for whoever asks first; on the CPU without swapping."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of what was freed is free as well
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def return_freed_memory() -> None:
    """Hand freed pages to the operating system, and to other processes on the GPU.

    Allocators keep what is freed: glibc all but the largest blocks, torch's CUDA allocator
    everything.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
