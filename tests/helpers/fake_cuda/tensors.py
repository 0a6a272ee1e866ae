"""Tensors of a pretended GPU: shapes, strides, dtypes and a device, and nothing in them.

Tensors on the CPU are real. ``FakeTensorMode`` refuses what mixes devices and what would need a
value; the two modes here note what waits, and do by hand what torch without CUDA cannot parse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.helpers.fake_cuda.runtime import DEVICE, forbid_in_capture
from tests.helpers.fake_cuda.seen import Kind, Seen

aten = torch.ops.aten
_WAITS = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "_unique2",
    "unique_consecutive", "unique_dim", "bincount", "nonzero_numpy", "multinomial",
}  # fmt: skip
_QUERIES = {"dim", "element_size", "is_contiguous", "numel", "size", "storage_offset", "stride"}
_HOST_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"}


class FakeDevice(FakeTensorMode):
    """Believes that torch has no device to start, which is so, whatever `torch.cuda` says."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class Memory:
    """Pinned memory, which is ordinary memory that is known to be pinned."""

    def __init__(self) -> None:
        self._pinned: set[int] = set()

    def pinned(self, *size: Any, **options: Any) -> torch.Tensor:
        tensor = torch.zeros(*size, **options)
        self._pinned.add(tensor.untyped_storage().data_ptr())
        self._kept = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


class WatchedFunctions(TorchFunctionMode):
    """Python's side of torch: the CPU's tensors are handed to the real functions."""

    def __init__(self, seen: Seen, memory: Memory) -> None:
        super().__init__()
        self._seen, self._memory = seen, memory

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute
            return func(*args)
        if name in _QUERIES:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        leaves = _leaves(args, kwargs)
        on_device = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if not on_device and not any(_names_the_device(leaf) for leaf in leaves):
            with _disable_current_modes():
                return self._on_host(func, name, args, kwargs)
        if name in ("tensor", "as_tensor") and not on_device:
            device = kwargs.pop("device")
            with _disable_current_modes():
                args = (func(*args, **kwargs), device)
            return self._sent(*args)
        if name == "copy_":
            return self._copy_(*args, **kwargs)
        if name in ("to", "cuda") and not isinstance(args[0], FakeTensor):
            return self._sent(*args, **kwargs)
        if name == "__getitem__":
            return _indexed(self._seen, *args)
        if name == "__setitem__":
            return _assign(self._seen, *args)
        if name in _HOST_READS:
            self._seen.note(Kind.STALL, f"Tensor.{name}")
        if name == "is_pinned":
            return False
        return func(*args, **kwargs)

    def _on_host(self, func, name: str, args, kwargs):
        if kwargs.pop("pin_memory", False):
            forbid_in_capture(self._seen, "allocation of pinned memory")
            return self._memory.pinned(*args, **kwargs)
        if name == "pin_memory":
            return self._memory.pinned(args[0].shape, dtype=args[0].dtype).copy_(args[0])
        if name == "is_pinned":
            return self._memory.is_pinned(*args)
        return func(*args, **kwargs)

    def _sent(self, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("copy", None)
        _, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        target = torch.empty(source.shape, dtype=dtype or source.dtype, device=DEVICE)
        return self._copy_(target, source, non_blocking)

    def _copy_(self, target, source, non_blocking: bool = False):
        if isinstance(target, FakeTensor) and isinstance(source, FakeTensor):
            return aten.copy_.default(target, source, non_blocking)
        host = source if isinstance(target, FakeTensor) else target
        if host.dim() == 0 and host is source:  # a scalar travels with the launch
            return aten.copy_.default(target, source, non_blocking)
        towards = "the device" if host is source else "the host"
        waits = not (non_blocking and self._memory.is_pinned(host))
        if waits:
            self._seen.note(Kind.STALL, f"copy to {towards} of memory that is not pinned, or waits")
        else:
            assert target.dtype is source.dtype, "a conversion goes through memory not pinned"
            assert target.is_contiguous(), "as above"
            assert source.is_contiguous(), "as above"
            self._seen.note(Kind.UPLOAD if host is source else Kind.READ, f"{host.nbytes} bytes")
        if self._seen.in_capture:
            self._seen.note(Kind.FORBIDDEN, f"a copy to {towards}")
        if host is target:
            with _disable_current_modes():
                host.zero_()
        return target


class WatchedOps(TorchDispatchMode):
    """Records torch's operations on the device."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _with_index(kwargs["device"])
        name = func._schema.name.removeprefix("aten::")
        leaves = _leaves(args, kwargs)
        if any(isinstance(leaf, FakeTensor) and leaf.is_cuda for leaf in leaves):
            if name in _WAITS or (name == "repeat_interleave" and func._overloadname == "Tensor"):
                self._seen.note(Kind.STALL, name)
                if name == "equal":
                    return True
            if name in ("index", "index_put", "index_put_"):
                _check_indices(self._seen, args[1])
        if name == "_to_copy" and "device" in kwargs:
            self._note_copy(args[0], kwargs["device"])
        return func(*args, **kwargs)

    def _note_copy(self, source: torch.Tensor, device: torch.device | None) -> None:
        if device is not None and device.type != source.device.type:
            self._seen.note(Kind.STALL, f"copy of {tuple(source.shape)} to {device.type}, pageable")
            if self._seen.in_capture:
                self._seen.note(Kind.FORBIDDEN, "a pageable copy")


def real_from_numpy(from_numpy: Callable[[np.ndarray], torch.Tensor]):
    def real(array: np.ndarray) -> torch.Tensor:
        with _disable_current_modes():
            return from_numpy(array)

    return real


def _leaves(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call, lists and tuples replaced by their members. Torch's pytree would go
    through any structure, which takes longer than the call itself."""
    leaves = []
    for value in (*args, *kwargs.values()):
        leaves += value if isinstance(value, list | tuple) else (value,)
    return leaves


def _names_the_device(value: object) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


def _with_index(value: object) -> object:
    if isinstance(value, torch.device) and value.type == "cuda" and value.index is None:
        return DEVICE
    return value


def _check_indices(seen: Seen, indices: Any) -> None:
    for index in indices:
        if index is None:
            continue
        if index.dtype in (torch.bool, torch.uint8):
            seen.note(Kind.STALL, "indexing by a mask")
        elif index.device.type == "cpu":
            seen.note(Kind.STALL, "indexing by a tensor on the host")


def _viewed(seen: Seen, tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list]:
    """The basic part of an index applied, and tensors for the dimensions of what is left."""
    parts = index if isinstance(index, tuple) else (index,)
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    dim, indices = 0, []
    for part in parts:
        if part is Ellipsis:
            skipped = tensor.dim() - dim - taken
            indices += [None] * skipped
            dim += skipped
            continue
        taken -= part is not None
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            first, last, step = part.indices(tensor.shape[dim])
            tensor = aten.slice.Tensor(tensor, dim, first, last, step)
        elif isinstance(part, int | np.integer) and not isinstance(part, bool):
            tensor = tensor.select(dim, int(part))
            continue
        else:
            if not isinstance(part, torch.Tensor):
                seen.note(Kind.STALL, "indexing by values on the host")
                part = torch.as_tensor(part, device=DEVICE)
            indices.append(part)
            dim += 1
            continue
        indices.append(None)
        dim += 1
    return tensor, indices if any(part is not None for part in indices) else []


def _indexed(seen: Seen, tensor: torch.Tensor, index: Any) -> torch.Tensor:
    view, indices = _viewed(seen, tensor, index)
    return aten.index.Tensor(view, indices) if indices else view


def _assign(seen: Seen, tensor: torch.Tensor, index: Any, value: Any) -> None:
    view, indices = _viewed(seen, tensor, index)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=DEVICE)
    elif not isinstance(value, FakeTensor) and value.dim():
        seen.note(Kind.STALL, "assignment of values on the host")
        value = torch.empty(value.shape, dtype=value.dtype, device=DEVICE)
    if indices:
        assert value.dtype is tensor.dtype, "index_put_ converts nothing"
        aten.index_put_.default(view, indices, value)
    else:
        aten.copy_.default(view, value)


def modes(seen: Seen, memory: Memory) -> Iterator[Any]:
    """The modes of a pretended GPU, in the order in which to enter them."""
    yield FakeDevice(allow_non_fake_inputs=True)
    yield WatchedOps(seen)
    yield WatchedFunctions(seen, memory)
