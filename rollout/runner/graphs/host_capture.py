"""Graphs on the CPU: the calls of ops that a function makes, made again without the function.

A forward of few rows calls hundreds of ops, and Python takes a third of its time. Shapes, strides
and addresses are the same each time that a captured function runs, so the compiled ops' calls are
kept in the extension, and the few of torch's own here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout.models.layers.linear import FEW_ROWS, Linear
from rollout.ops.extension import cpu
from rollout.runner.graphs.capture import GraphTooLargeError, Tensors

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
}
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
"""Methods that give Python what a tensor holds, which another run would not see."""

_HOST_ROWS = 128
"""Rows of the largest forward that is captured on a CPU: of more, Python takes a small part."""

_TORCH_ROWS = 16
"""The same where torch multiplies, whose results a graph keeps, each in memory of its own."""

_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class HostCapture:
    """Captures what functions do to CPU tensors: one function, in several shapes. Each graph has
    memory of its own."""

    shares_memory = False

    def __init__(self) -> None:
        self._reads_nothing = False  # a capture succeeded in which no tensor could be read

    def __call__(
        self,
        function: Callable[[], Tensors],
        make_outputs: Callable[[Tensors], Tensors],
        max_bytes: int | None = None,
    ) -> HostGraph:
        """Run the function, and keep its calls and its results, which need no other place."""
        graph = HostGraph()
        # Watching for reads takes as long as the function, and shapes do not change what it reads.
        with nullcontext() if self._reads_nothing else _Reads(), _Calls(graph):
            try:
                graph.calls.start()
                graph.results = function()
            finally:
                graph.calls.stop()
        self._reads_nothing = True
        if max_bytes is not None and graph.num_bytes > max_bytes:
            raise GraphTooLargeError(graph.num_bytes)
        return graph

    def reset(self) -> None:
        """Watch for reads again; a graph's memory goes with it."""
        self._reads_nothing = False


def host_capture(linears: Sequence[Linear]) -> HostCapture | None:
    """How functions that multiply with these are captured on a CPU; None where they cannot be: the
    ops are not compiled, or a weight has no address of its own."""
    if cpu is None or not all(linear.writes_in_place for linear in linears):
        return None
    return HostCapture()


def host_rows(linears: Sequence[Linear]) -> int:
    """Rows of the largest forward through these that is captured."""
    if all(linear.multiplies_tiles for linear in linears):
        return _HOST_ROWS
    return FEW_ROWS if all(linear.multiplies_few_rows for linear in linears) else _TORCH_ROWS


class HostGraph:
    """Calls of ops in order: the extension's, and between them torch's own."""

    def __init__(self) -> None:
        self.calls = cpu.Recording()
        self.memory = _Memory()
        self.results: Tensors = {}
        self._torch_calls: list[tuple[int, Callable[[], object]]] = []

    @property
    def num_bytes(self) -> int:
        """Memory between its calls."""
        return self.memory.num_bytes

    def add(self, call: Callable[[], object]) -> None:
        """Add a call of torch's, behind those of the extension so far."""
        self._torch_calls.append((len(self.calls), call))

    def replay(self) -> None:
        """Make all calls again."""
        first = 0
        for last, call in self._torch_calls:
            if last > first:
                self.calls.replay(first, last)
                first = last
            call()
        self.calls.replay(first, len(self.calls))


class _Memory:
    """The tensors of a graph: what the captured function let go of is handed out again, so that it
    stays in the processor's caches."""

    def __init__(self) -> None:
        self.blocks: list[torch.UntypedStorage] = []

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes() for block in self.blocks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor that shares memory with none that is alive."""
        num_bytes = math.prod(shape) * dtype.itemsize
        for block in self.blocks:
            if block.nbytes() == num_bytes and torch._C._storage_Use_Count(block._cdata) == 1:
                return torch.empty(0, dtype=dtype).set_(block).view(tuple(shape))
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.keep([tensor])
        return tensor

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the memory of tensors that were made elsewhere."""
        self.blocks += [tensor.untyped_storage() for tensor in tensors]


class _Calls(TorchDispatchMode):
    """Sees torch's own calls, and adds to the graph those that compute."""

    def __init__(self, graph: HostGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _DEPENDS_ON_DATA & set(func.tags) and not _has_fixed_shape(func, args):
            raise RuntimeError(f"{func} depends on what its tensors hold")
        if func in _ALLOCATIONS:
            like = func(*args, **kwargs)
            if like.is_contiguous():
                return self._graph.memory.empty(like.shape, like.dtype)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._graph.add(lambda: func(*args, **kwargs))
            return result
        storages = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = _tensors(result)
        if any(tensor.untyped_storage()._cdata not in storages for tensor in made):  # no mere views
            self._graph.memory.keep(made)
            self._graph.add(partial(_compute_into, made, func, args, kwargs))
        return result


@cache
def _is_composite(func: Any) -> bool:
    """Whether it is made of other calls, each of which is seen."""
    name, key = func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _has_fixed_shape(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is an index by numbers, and not by truth values."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype is not torch.bool for index in args[1])


def _compute_into(
    results: list[torch.Tensor], func: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    for result, tensor in zip(results, _tensors(func(*args, **kwargs)), strict=True):
        result.copy_(tensor)


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among them, without oneDNN's packed weights, which have no storage."""
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in leaves if tensor.layout is torch.strided]


class _Reads(TorchFunctionMode):
    """Refuses what gives a tensor's numbers to Python."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _READS:
            raise RuntimeError(f"Tensor.{func.__name__} reads numbers that another run may change")
        return func(*args, **(kwargs or {}))
