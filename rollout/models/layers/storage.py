"""The memory that weights and KV lie in: freed and allocated in place, and backed by huge pages."""

from __future__ import annotations

import ctypes
import math
import sys

import torch

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # Linux, <linux/mman.h>

_SEGMENT = 2 << 20
_OWN_SEGMENT = 10 << 20
"""Torch's CUDA allocator rounds segments up to ``_SEGMENT`` bytes, and gives tensors of at least
``_OWN_SEGMENT`` one of their own, unless it kept a larger one. Another tensor may get the rest, and
keep the whole segment when this one is freed."""


def whole_segments(num_bytes: int, device: torch.device) -> int:
    """``num_bytes``, rounded up so that no other tensor gets the rest of the CUDA segment."""
    if device.type != "cuda" or num_bytes < _OWN_SEGMENT:
        return num_bytes
    return -(-num_bytes // _SEGMENT) * _SEGMENT


def empty_alone(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor, its values undefined, that leaves no rest of a CUDA segment: from 10 MiB
    on, all its memory can be given back."""
    numel = math.prod(shape)
    num_bytes = whole_segments(numel * dtype.itemsize, device)
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return memory.view(dtype)[:numel].view(shape)


def free_storage(tensor: torch.Tensor) -> int:
    """Free a tensor's memory. Returns the bytes, 0 if it was free already.

    Tensors that share the storage lose their memory too, until ``allocate_storage``. Reading or
    writing them before crashes the process, so the caller must prevent it.
    """
    storage = tensor.untyped_storage()
    freed = storage.nbytes()
    storage.resize_(0)
    return freed


def allocate_storage(tensor: torch.Tensor, *, alone: bool = False) -> None:
    """Allocate a freed tensor's memory, its values undefined. Does nothing if it has memory.

    ``alone``: as `empty_alone` does.

    The address may change, so whatever stores addresses, such as a captured graph, is invalid
    afterwards.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        assert tensor.is_contiguous(), "a view, not the whole"
        num_bytes = tensor.numel() * tensor.itemsize
        storage.resize_(whole_segments(num_bytes, tensor.device) if alone else num_bytes)


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Ask Linux for 2 MiB pages under this memory, and under what shares them at both ends.

    A step reads all weights once. With pages of 4 KiB a large part of it is waiting for address
    translations, more or less of them by where in memory the weights fell. The request is a hint:
    systems without huge pages, or short of them, leave the memory as it is. Pages written before
    are copied together at once (Linux 6.1 and newer), others become huge when they are written.
    """
    if sys.platform != "linux" or num_bytes < _HUGE_PAGE // 4:  # not worth a page
        return
    start = address // _HUGE_PAGE * _HUGE_PAGE
    end = -(-(address + num_bytes) // _HUGE_PAGE) * _HUGE_PAGE
    madvise = ctypes.CDLL(None).madvise
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
