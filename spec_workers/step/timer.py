"""Times of a step's phases, also where the host runs ahead of the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from rollout.types import StepTimes


class SteadyPhases(NamedTuple):
    """The phases of a step whose timing is steady-state: nothing was compiled or captured in it."""

    forward: bool
    drafting: bool


class StepTimer:
    """Times each phase of one step that is entered as a context, then sums them up in `end`.

    On a GPU forward and sampling are timed there, from when they are begun, or from when the GPU is
    done with what came before, to their last kernel: so laying out inputs counts where the GPU
    waits for them. On the CPU they are timed by the clock on the wall.
    """

    def __init__(self, device: torch.device) -> None:
        self._draft_ms = self._launch_ms = self._waited_ms = 0.0  # of the host
        self._wall = [0.0, 0.0, 0.0]
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in self._wall] if self._stream else []
        )

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Count the context as drafting: it proposes, or observes."""
        started = time.perf_counter()
        yield
        self._draft_ms += _ms_since(started)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count the context as launching the forward, which may end later."""
        started = time.perf_counter()
        self._mark(0)
        yield
        self._mark(1)
        self._launch_ms += _ms_since(started)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the context as launching sampling, which may end later."""
        started = time.perf_counter()
        yield
        self._mark(2)
        self._launch_ms += _ms_since(started)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the context as waiting for the device."""
        started = time.perf_counter()
        yield
        self._waited_ms += _ms_since(started)

    @contextmanager
    def booking(self) -> Iterator[None]:
        """Count the context, other work of the host before the step's end, as launching."""
        started = time.perf_counter()
        yield
        self._launch_ms += _ms_since(started)

    def end(self) -> StepTimes:
        """Milliseconds by phase. Called once, when the step is done."""
        forward_ms = self._between(0, 1)
        return StepTimes(
            draft=self._draft_ms,
            forward=forward_ms,
            sample=max(0.0, self._launch_ms + self._waited_ms - forward_ms),
            waited=self._waited_ms,
        )

    def _between(self, begin: int, end: int) -> float:
        if self._events:
            self._events[end].synchronize()
            return self._events[begin].elapsed_time(self._events[end])
        return (self._wall[end] - self._wall[begin]) * 1e3

    def _mark(self, which: int) -> None:
        self._wall[which] = time.perf_counter()
        if self._events:
            self._events[which].record(self._stream)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
