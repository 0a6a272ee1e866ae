"""One replica, from event to event."""

from __future__ import annotations

import heapq
import math
from collections import deque

from scale_sim.hardware import Hardware, accept_length


class SimulatedReplica:
    """All that run get the same number of tokens a step, so one number says how far all are.

    Between two changes of who runs, n steps take ``n * (base + kv * contexts)`` and
    ``kv * gain * n**2 / 2`` seconds, where the contexts grow by ``gain`` tokens a step.
    """

    def __init__(self, hardware: Hardware, seats: int, *, speculates: bool) -> None:
        """``seats``: requests that run together; others wait here."""
        self._hardware = hardware
        self._seats = seats
        # By how many run.
        self._accepted = [1.0] + [
            accept_length(running, speculates=speculates) for running in range(1, seats + 1)
        ]
        self._now = 0.0
        self._progress = 0.0  # tokens that a request running since the start would have
        self._contexts = 0.0  # tokens, of all that run
        self._ends: list[tuple[float, int]] = []  # (progress, request), a heap
        self._context_at_end: dict[int, float] = {}
        self._waiting: deque[tuple[int, int, int]] = deque()
        self.busy_seconds = 0.0
        self.seat_seconds = 0.0  # running requests, integrated
        self.version = 0  # counts changes: an event planned for another is stale

    @property
    def num_running(self) -> int:
        return len(self._ends)

    def start(self, request: int, context: int, remaining: int) -> None:
        """``context``: tokens it has; ``remaining``: tokens it is going to emit."""
        if self.num_running == self._seats:
            self._waiting.append((request, context, remaining))
            return
        heapq.heappush(self._ends, (self._progress + remaining, request))
        self._context_at_end[request] = context + remaining
        self._contexts += context
        self.version += 1

    def advance(self, now: float) -> list[int]:
        """Requests that ended by then."""
        ended: list[int] = []
        while self._ends:
            seconds = self._seconds_to(self._ends[0][0])
            if self._now + seconds > now + 1e-9:
                self._run(self._steps_in(now - self._now), now - self._now)
                break
            progress, request = self._ends[0]
            self._run((progress - self._progress) / self._accept, seconds)
            self._progress = progress
            heapq.heappop(self._ends)
            self._contexts -= self._context_at_end.pop(request)
            ended.append(request)
            self.version += 1
            if self._waiting:
                self.start(*self._waiting.popleft())
        self._now = now
        return ended

    def next_end(self) -> float:
        """When the next one ends, if nothing changes."""
        return self._now + self._seconds_to(self._ends[0][0]) if self._ends else math.inf

    def stop_all(self) -> dict[int, float]:
        """Nothing runs any more; what each had yet to emit."""
        left = {request: progress - self._progress for progress, request in self._ends}
        left |= {request: float(remaining) for request, _, remaining in self._waiting}
        self._waiting.clear()
        self._ends, self._context_at_end, self._contexts = [], {}, 0.0
        self.version += 1
        return left

    @property
    def _accept(self) -> float:
        return self._accepted[len(self._ends)]

    def _coefficients(self) -> tuple[float, float]:
        """Seconds of n steps are ``a * n**2 + b * n``."""
        kv = self._hardware.seconds_per_context_token
        gain = len(self._ends) * self._accept
        return kv * gain / 2, self._hardware.base_seconds + kv * self._contexts

    def _seconds_to(self, progress: float) -> float:
        steps = (progress - self._progress) / self._accept
        a, b = self._coefficients()
        return a * steps * steps + b * steps

    def _steps_in(self, seconds: float) -> float:
        a, b = self._coefficients()
        return 2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))

    def _run(self, steps: float, seconds: float) -> None:
        gained = steps * self._accept
        self._progress += gained
        self._contexts += gained * self.num_running
        self.busy_seconds += seconds
        self.seat_seconds += seconds * self.num_running
        self._now += seconds
