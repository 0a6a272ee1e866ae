"""Finds replicas that hang without dying."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

_TICKS = 10
"""Looks at each replica per time it may be silent for."""


class Pulsed(Protocol):
    """A replica that can be asked how long its engine has been busy."""

    def pulse(self) -> Future[float]:
        """Seconds that its engine's step or call under way has taken; 0.0 while nothing is."""
        ...


class Heartbeats:
    """Asks each replica for its pulse, on a thread of its own: whoever calls the cluster may be
    waiting for an answer of the very one that hangs.

    The pulse is not the engine's to give, so a long step (a huge prefill, a weight load) leaves it
    in time; how long that may take is a limit of its own.
    """

    def __init__(
        self, silence_seconds: float, stall_seconds: float, on_hang: Callable[[Pulsed, str], None]
    ) -> None:
        """``on_hang(replica, reason)`` is called on that thread, once for each."""
        self._silence_seconds = silence_seconds
        self._stall_seconds = stall_seconds
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._patients: dict[Pulsed, _HealthCheck] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def watch(self, replica: Pulsed) -> None:
        """Begin to ask this replica for its pulse."""
        with self._lock:
            self._patients[replica] = _HealthCheck(replica)

    def forget(self, replica: Pulsed) -> None:
        """Stop asking this replica; does nothing if it is not watched."""
        with self._lock:
            self._patients.pop(replica, None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        period = self._silence_seconds / _TICKS
        looked_at = time.monotonic()
        while not self._closed.wait(period):
            # Not more than two periods: this process was stopped itself, and its replicas perhaps.
            elapsed = min(time.monotonic() - looked_at, 2 * period)
            looked_at = time.monotonic()
            with self._lock:
                patients = list(self._patients.items())
            for replica, patient in patients:
                reason = patient.look(elapsed, self._silence_seconds, self._stall_seconds)
                if reason is not None:
                    self.forget(replica)
                    self._on_hang(replica, reason)


class _HealthCheck:
    """A replica, and the pulse it was asked for."""

    def __init__(self, replica: Pulsed) -> None:
        self._replica = replica
        self._pulse: Future[float] | None = None
        self._silent_seconds = 0.0

    def look(self, elapsed: float, silence_seconds: float, stall_seconds: float) -> str | None:
        """The reason why the replica counts as hung; None while it does not. ``elapsed``: seconds
        since the last look."""
        pulse = self._pulse
        if pulse is not None and not pulse.done():
            self._silent_seconds += elapsed
            if self._silent_seconds > silence_seconds:
                return f"no sign of life for {self._silent_seconds:.0f} s (heartbeat_seconds)"
            return None
        if pulse is not None and pulse.exception() is not None:
            return None  # it is dead, which is heard of elsewhere
        if pulse is not None and (busy := pulse.result()) > stall_seconds:
            return f"{busy:.0f} s in one step or call (stall_seconds)"
        self._pulse = self._replica.pulse()
        self._silent_seconds = 0.0
        return None
