"""How long the phases of a step take, also where the host runs ahead of the device."""

from __future__ import annotations

import time

import torch


class StepClock:
    """Made when a step begins. Milliseconds.

    On a GPU forward and sampling are timed there, from when they are begun, or from when the GPU is
    done with what came before, to their last kernel: so laying out inputs counts where the GPU
    waits for them. On the CPU they are timed by the clock on the wall.
    """

    def __init__(self, device: torch.device) -> None:
        self._last = time.perf_counter()
        self._wall = [0.0, 0.0, 0.0]
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in self._wall] if self._stream else []
        )

    def lap(self) -> float:
        """Milliseconds since the last lap."""
        now = time.perf_counter()
        lap, self._last = (now - self._last) * 1e3, now
        return lap

    def begin_forward(self) -> None:
        self._mark(0)

    def end_forward(self) -> None:
        """The forward is launched, maybe not done."""
        self._mark(1)

    def end_sampling(self) -> None:
        """Sampling is launched, maybe not done."""
        self._mark(2)

    def forward(self) -> float:
        """Milliseconds of the forward; waits for its end."""
        return self._between(0, 1)

    def sampling(self) -> float:
        """Milliseconds of sampling; waits for its end."""
        return self._between(1, 2)

    def _between(self, begin: int, end: int) -> float:
        if self._events:
            self._events[end].synchronize()
            return self._events[begin].elapsed_time(self._events[end])
        return (self._wall[end] - self._wall[begin]) * 1e3

    def _mark(self, which: int) -> None:
        self._wall[which] = time.perf_counter()
        if self._events:
            self._events[which].record(self._stream)
