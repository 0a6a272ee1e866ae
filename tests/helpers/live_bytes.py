"""The memory of tensors that a block of code makes, on the thread that runs it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Within the block: how much is alive at once of what operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest = 0  # one allocation
        self._live = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._known.setdefault(storage, 0)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage not in self._known:
                self._known[storage] = storage.nbytes()
                self._live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
                self.peak = max(self.peak, self._live)
                self.largest = max(self.largest, storage.nbytes())
        return result

    def _freed(self, num_bytes: int) -> None:
        self._live -= num_bytes


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return [
        each.untyped_storage() for each in tensors if each.layout is torch.strided and each.numel()
    ]
