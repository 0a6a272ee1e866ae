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
    """Times one step: drafting and forward are contexts, the rest until `end` counts as sampling.

    On a GPU the forward is timed there, from when it is begun, or from when the GPU is done with
    what came before, to its last kernel: so laying out inputs counts where the GPU waits for them.
    On the CPU it is timed by the clock on the wall.
    """

    def __init__(self, device: torch.device) -> None:
        self._started = time.perf_counter()
        self._draft_ms = self._forward_ms = 0.0  # of the host
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []  # on a GPU: the forward's begin and end

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Count the context as drafting: it proposes, or observes."""
        started = time.perf_counter()
        yield
        self._draft_ms += _ms_since(started)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count the context as the forward, or as launching it: then it may end later."""
        started = time.perf_counter()
        self._mark()
        yield
        self._mark()
        self._forward_ms = _ms_since(started)

    def end(self) -> StepTimes:
        total_ms, forward_ms = _ms_since(self._started), self._forward_ms
        if self._events:
            begin, end = self._events
            end.synchronize()
            forward_ms = begin.elapsed_time(end)
        sample_ms = max(0.0, total_ms - self._draft_ms - forward_ms)
        return StepTimes(draft=self._draft_ms, forward=forward_ms, sample=sample_ms)

    def _mark(self) -> None:
        if self._stream is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._events.append(event)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
