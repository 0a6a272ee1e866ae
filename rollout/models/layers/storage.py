"""Frees and allocates a tensor's memory while the tensor and its views stay valid objects."""

from __future__ import annotations

import torch


def free_storage(tensor: torch.Tensor) -> int:
    """Free a tensor's memory. Returns the bytes, 0 if it was free already.

    Tensors that share the storage lose their memory too, until ``allocate_storage``. Reading or
    writing them before crashes the process, so the caller must prevent it.
    """
    storage = tensor.untyped_storage()
    freed = storage.nbytes()
    storage.resize_(0)
    return freed


def allocate_storage(tensor: torch.Tensor) -> None:
    """Allocate a freed tensor's memory, its values undefined. Does nothing if it has memory.

    The address may change, so whatever stores addresses, such as a captured graph, is invalid
    afterwards.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        assert tensor.is_contiguous(), "a view, not the whole"
        storage.resize_(tensor.numel() * tensor.itemsize)
