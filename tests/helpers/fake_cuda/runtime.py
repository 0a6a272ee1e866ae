"""Stand-ins for ``torch.cuda``: they note what is asked of them, and raise where CUDA would.

Times are made up: a millisecond between any two events. Memory is a number that nothing changes.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.helpers.fake_cuda.seen import Kind, Seen

DEVICE = torch.device("cuda", 0)
GIB = 1 << 30


class FakeStream:
    def __init__(self, seen: Seen, name: str) -> None:
        self._seen, self._name = seen, name
        self.cuda_stream = 0
        self.device = DEVICE

    def synchronize(self) -> None:
        forbid_in_capture(self._seen, "Stream.synchronize")
        self._seen.note(Kind.STREAM_WAIT, self._name)

    def wait_stream(self, other: FakeStream) -> None:
        assert isinstance(other, FakeStream)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.is_recorded, "waiting for an event that was never recorded waits for nothing"

    def record_event(self, event: FakeEvent) -> FakeEvent:
        event.record(self)
        return event

    def query(self) -> bool:
        forbid_in_capture(self._seen, "Stream.query")
        return True


class FakeEvent:
    def __init__(self, seen: Seen, enable_timing: bool) -> None:
        self._seen, self._times = seen, enable_timing
        self.is_recorded = False

    def record(self, stream: FakeStream | None = None) -> None:
        if self._seen.in_capture and self._times:
            forbid_in_capture(self._seen, "Event.record with timing")
        self.is_recorded = True

    def synchronize(self) -> None:
        forbid_in_capture(self._seen, "Event.synchronize")
        assert self.is_recorded, "synchronizing an event that was never recorded"
        self._seen.note(Kind.EVENT_WAIT, "event")

    def query(self) -> bool:
        forbid_in_capture(self._seen, "Event.query")
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self._times and end._times):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.is_recorded and end.is_recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1.0


class FakeGraph:
    """A graph whose replay computes nothing: tensors of a pretended device hold nothing."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self.is_captured = False

    def replay(self) -> None:
        assert self.is_captured, "a graph that was not captured"
        forbid_in_capture(self._seen, "CUDAGraph.replay")
        self._seen.note(Kind.REPLAY, "graph")


def forbid_in_capture(seen: Seen, what: str) -> None:
    """Raises what CUDA raises, where a stream is being captured."""
    if seen.in_capture:
        seen.note(Kind.FORBIDDEN, what)
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


def cuda_functions(seen: Seen) -> dict[str, Any]:
    """Replacements for functions of ``torch.cuda`` by name."""
    default = FakeStream(seen, "default stream")
    thread = SimpleNamespace(stream=default)

    def set_stream(stream: FakeStream) -> None:
        thread.stream = stream

    @contextmanager
    def on_stream(stream: FakeStream):
        before = thread.stream
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)

    @contextmanager
    def on_device(device: torch.device | int):
        yield

    @contextmanager
    def capture(
        cuda_graph: FakeGraph,
        pool: Any = None,
        stream: FakeStream | None = None,
        capture_error_mode: str = "global",
    ):
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        forbid_in_capture(seen, "a capture")
        seen.note(Kind.CAPTURE, "graph")
        before = thread.stream
        set_stream(stream or FakeStream(seen, "capture stream"))
        seen.in_capture = seen.generator_captures = True
        refused = len(seen.of(Kind.FORBIDDEN))
        try:
            yield
        finally:
            seen.in_capture = False
            if len(seen.of(Kind.FORBIDDEN)) > refused:  # as torch leaves it: see CudaCapture
                raise RuntimeError("operation failed due to a previous error during capture")
            seen.generator_captures = False
            set_stream(before)
        cuda_graph.is_captured = True

    def synchronize(device: Any = None) -> None:
        forbid_in_capture(seen, "torch.cuda.synchronize")
        seen.note(Kind.STREAM_WAIT, "the whole device")

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        forbid_in_capture(seen, "torch.cuda.mem_get_info")
        return 100 * GIB, 140 * GIB

    def empty_cache() -> None:
        forbid_in_capture(seen, "torch.cuda.empty_cache")

    properties = SimpleNamespace(
        name="a pretended H200", multi_processor_count=132, major=9, minor=0,
        total_memory=140 * GIB, uuid="GPU-pretended",
    )  # fmt: skip
    return {
        "Event": lambda enable_timing=False, **_: FakeEvent(seen, enable_timing),
        "Stream": lambda device=None, priority=0: FakeStream(seen, "side stream"),
        "CUDAGraph": lambda: FakeGraph(seen),
        "current_stream": lambda device=None: thread.stream,
        "default_stream": lambda device=None: default,
        "set_stream": set_stream,
        "stream": on_stream,
        "device": on_device,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: seen.in_capture,
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: GIB,
        "reset_peak_memory_stats": lambda device=None: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
    }
