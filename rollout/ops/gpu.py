"""Helpers that the Triton ops share.

They are written for CUDA tensors; with TRITON_INTERPRET=1 in the environment from the start, CPU
tensors go the same way, and so does all of an engine's code for GPUs.

All are launched with ``enable_fp_fusion=False``: every multiplication and addition rounds as it is
written, so kernels that share lines share bits, and Triton need not warn of a default that changes.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED_PROGRAMS = 3  # few, so that each has several tiles to walk


def runs_on(device: torch.device) -> bool:
    """Whether tensors there are the Triton ops' business."""
    return device.type == "cuda" or (_INTERPRETED and device.type == "cpu")


def supports(*tensors: torch.Tensor) -> bool:
    """Whether the Triton ops take these: on a GPU, of one dtype they know, rows adjacent."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(
        runs_on(tensor.device) and tensor.dtype is dtype and tensor.stride(-1) == 1
        for tensor in tensors
    )


def check_row_alignment(rows_RV: torch.Tensor) -> None:
    """Raises ValueError where rows lie otherwise than in a tensor of their own: by their address
    Triton decides which numbers a thread is given, and so in which order they are added up."""
    if rows_RV.data_ptr() % 16 and rows_RV.stride(0) % 16 == 0:
        raise ValueError("rows must begin at a multiple of 16 bytes: pass a copy")


def on(device: torch.device) -> AbstractContextManager[object]:
    """Within it kernels are launched on the device. Triton asks the thread which GPU it is on, not
    the tensors which one they are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, each having a multiprocessor to itself."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
