"""The protocol of a graph capture, and its CUDA form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

Tensors = dict[str, torch.Tensor]

_MAX_OF_DRIVER = 32 << 20


class Captured(Protocol):
    """A captured function that can be replayed."""

    @property
    def num_bytes(self) -> int:
        """Memory that capturing it took."""
        ...

    @property
    def results(self) -> Tensors:
        """The tensors that the function returned. Each replay overwrites them."""
        ...

    def replay(self) -> None:
        """Compute the results again, from whatever the tensors that are read hold now."""
        ...


class GraphTooLargeError(Exception):
    """A graph would take more memory than it may, so nothing was captured."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"a graph of {num_bytes} bytes")
        self.num_bytes = num_bytes


class Capture(Protocol):
    """Makes graphs of what functions launch."""

    @property
    def shares_memory(self) -> bool:
        """Whether all graphs use the same memory, which comes back only as a whole."""
        ...

    def __call__(
        self,
        function: Callable[[], Tensors],
        make_outputs: Callable[[Tensors], Tensors],
        max_bytes: int | None = None,
    ) -> Captured:
        """Run ``function`` and capture what it does.

        ``make_outputs``: makes tensors for the results where they need a place of their own.

        Raises RuntimeError where the function cannot be captured, and GraphTooLargeError where it
        takes more than ``max_bytes`` by itself.
        """
        ...

    def reset(self) -> None:
        """Give back the memory of all that was captured and is let go of."""
        ...


class CudaCapture:
    """Graphs that share one pool of memory, as no two of them run at once.

    What a graph computes is overwritten by the next one: it ends by copying its results to tensors
    from outside.
    """

    shares_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        # One for all of them: cuBLAS keeps a workspace for each stream it was ever called on.
        self._stream: torch.cuda.Stream | None = None

    def __call__(
        self,
        function: Callable[[], Tensors],
        make_outputs: Callable[[Tensors], Tensors],
        max_bytes: int | None = None,
    ) -> Captured:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        # Kernels are compiled and libraries make their workspaces before anything is recorded.
        side, usual = self._stream, torch.cuda.current_stream(self._device)
        side.wait_stream(usual)
        # Memory is kept for each stream, and this one has none, so a run takes as much of the
        # device as a graph of it will where nothing is left by others.
        unused = torch.cuda.memory_reserved(self._device)
        try:
            with torch.cuda.stream(side):
                computed = function()
                used = torch.cuda.memory_reserved(self._device)
                with torch.cuda.stream(usual):  # results outlive the run, and are no part of it
                    results = make_outputs(computed)
                unused += torch.cuda.memory_reserved(self._device) - used
                while computed:  # none is held when memory is measured
                    name, tensor = computed.popitem()
                    results[name].copy_(tensor)
                    del tensor
        finally:  # what was launched before it failed still reads and writes
            usual.wait_stream(side)
        taken = torch.cuda.memory_reserved(self._device) - unused
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        if max_bytes is not None and taken > max_bytes:
            raise GraphTooLargeError(taken)
        before = _Memory.of(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, a trainer's or a server's, may call CUDA meanwhile.
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            ):
                for name, tensor in function().items():
                    results[name].copy_(tensor)
        except BaseException:
            self._recover(usual)
            raise
        return _CudaGraph(graph, results, before.taken_until(_Memory.of(self._device)))

    def reset(self) -> None:
        """Give the pool's memory back. No graph is left that uses it."""
        self._pool = None
        torch.cuda.empty_cache()

    def _recover(self, usual: torch.cuda.Stream) -> None:
        """Tell torch that a failed capture is over, in the three places where it goes on believing
        in it."""
        # The thread stays on the stream that was captured.
        torch.cuda.set_stream(usual)
        # Up to version 2.11 the allocator, so that every `empty_cache` raises; later ones say here
        # that it has ended.
        index = self._device.index
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(
                torch.cuda.current_device() if index is None else index, self._pool
            )
        # The device's generator, which a trainer may draw from, until a capture succeeds.
        with suppress(RuntimeError), torch.cuda.stream(usual):
            one = torch.cuda.CUDAGraph()
            with torch.cuda.graph(one, stream=self._stream, capture_error_mode="thread_local"):
                torch.zeros(1, device=self._device)


class _Memory(NamedTuple):
    free: int  # for all processes
    reserved: int  # by torch in this one

    @staticmethod
    def of(device: torch.device) -> _Memory:
        return _Memory(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))

    def taken_until(self, after: _Memory) -> int:
        """The bytes taken since: growth of torch's pool, none where a graph fits into what others
        left there, and the few MiB that the driver takes for a graph, bounded because other
        processes take memory meanwhile."""
        grown = max(0, after.reserved - self.reserved)
        drivers = self.free - after.free - grown
        return grown + min(max(0, drivers), _MAX_OF_DRIVER)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, results: Tensors, num_bytes: int) -> None:
        self._graph = graph
        self.results = results
        self.num_bytes = num_bytes

    def replay(self) -> None:
        self._graph.replay()
