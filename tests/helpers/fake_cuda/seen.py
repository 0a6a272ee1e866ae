"""The events of a pretended GPU, in order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_OURS = tuple(str(ROOT / name) for name in ("rollout", "spec_workers", "benchmarks"))


class Kind(Enum):
    UPLOAD = "upload"  # from pinned memory, without waiting
    READ = "read"  # into pinned memory, without waiting
    LAUNCH = "launch"  # of a Triton kernel
    REPLAY = "replay"  # of a graph
    CAPTURE = "capture"  # of a graph begins
    STREAM_WAIT = "stream wait"  # the host waits for a stream
    EVENT_WAIT = "event wait"  # the host waits for an event
    STALL = "stall"  # the host waits where nobody would think so: a pageable copy, .item()
    FORBIDDEN = "forbidden"  # what the real thing raises for


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: Kind
    what: str
    where: str  # file:line of ours that asked
    in_capture: bool

    def __str__(self) -> str:
        captured = " in a capture" if self.in_capture else ""
        return f"{self.kind.value}{captured}: {self.what} at {self.where}"


@dataclass(slots=True)
class Seen:
    """``in_capture``: whether a graph is being captured now. ``generator_captures``: whether
    torch's random numbers on the device can be had in a capture alone."""

    events: list[Event] = field(default_factory=list)
    in_capture: bool = False
    generator_captures: bool = False

    def note(self, kind: Kind, what: str) -> None:
        event = Event(kind=kind, what=what, where=_caller(), in_capture=self.in_capture)
        self.events.append(event)

    def of(self, *kinds: Kind) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    @contextmanager
    def since(self) -> Iterator[Seen]:
        """The events within the context, filled in when it ends."""
        first, part = len(self.events), Seen()
        try:
            yield part
        finally:
            part.events = self.events[first:]


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return "a test"
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"
