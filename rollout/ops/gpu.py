"""Helpers that the Triton ops share.

The ops are for CUDA tensors. With TRITON_INTERPRET=1 in the environment from the start, CPU tensors
take the same path, and so does all of an engine's code for GPUs.

All kernels are launched with ``enable_fp_fusion=False``: every multiplication and addition rounds
as written, so kernels that share code give the same bits.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED_PROGRAMS = 3  # few, so that each has several tiles


def runs_on(device: torch.device) -> bool:
    """Whether the Triton ops take tensors on this device."""
    return device.type == "cuda" or (_INTERPRETED and device.type == "cpu")


def supports(*tensors: torch.Tensor) -> bool:
    """Whether the Triton ops take these tensors: GPU, one known dtype, contiguous last dims."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(
        runs_on(tensor.device) and tensor.dtype is dtype and tensor.stride(-1) == 1
        for tensor in tensors
    )


def check_row_alignment(rows_RV: torch.Tensor) -> None:
    """Raise ValueError unless rows are aligned as in a tensor of their own.

    Alignment decides which numbers Triton gives to a thread, and so the order of sums.
    """
    if rows_RV.data_ptr() % 16 and rows_RV.stride(0) % 16 == 0:
        raise ValueError("rows must begin at a multiple of 16 bytes: pass a copy")


def on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels are launched on the device: Triton uses the thread's current GPU,
    not that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def total_bytes(device: torch.device) -> int | None:
    """The memory of a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of the device."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
