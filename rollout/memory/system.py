"""From memory the process has freed to memory others can use."""

from __future__ import annotations

import ctypes

import torch


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
