"""Giving a tensor's memory back while the tensor, and every view of it, stays what it is."""

from __future__ import annotations

import torch


def free_storage(tensor: torch.Tensor) -> int:
    """Free the tensor's memory; the bytes freed, 0 where that was done before.

    Whatever shares the storage has no memory either, until ``allocate_storage``. Reading or writing
    it before is a crash, not an error: who frees must see to it that nobody does.
    """
    storage = tensor.untyped_storage()
    freed = storage.nbytes()
    storage.resize_(0)
    return freed


def allocate_storage(tensor: torch.Tensor) -> None:
    """Give a freed tensor memory again, its values undefined; one that has memory is left alone.

    The address may be another one. What remembers addresses, as captured graphs do, must be made
    anew, or such tensors must come from a pool of virtual addresses that outlives their memory.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        assert tensor.is_contiguous(), "a view, not the whole"
        storage.resize_(tensor.numel() * tensor.itemsize)
