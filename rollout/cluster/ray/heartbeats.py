"""Finds replicas that hang without dying."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from rollout.cluster.ray.replica import RayRank

_CHECKS = 10
"""Checks of each replica in the time it may be silent for."""


class Heartbeats:
    """Asks each replica for a heartbeat, on a thread of its own: whoever calls the cluster may be
    waiting for an answer of the very one that hangs.

    The engine's thread does not answer, so a heartbeat comes in time during a long step (a huge
    prefill, a weight load); how long that may take is a limit of its own.
    """

    def __init__(
        self,
        silence_seconds: float,
        stall_seconds: float,
        on_hang: Callable[[RayRank, str], None],
    ) -> None:
        """``on_hang(replica, reason)`` is called on that thread, once for each."""
        self._silence_seconds = silence_seconds
        self._stall_seconds = stall_seconds
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._checks: dict[RayRank, _HealthCheck] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def watch(self, replica: RayRank) -> None:
        """Begin to ask this replica for heartbeats."""
        with self._lock:
            self._checks[replica] = _HealthCheck(replica)

    def forget(self, replica: RayRank) -> None:
        """Stop asking this replica; does nothing if it is not watched."""
        with self._lock:
            self._checks.pop(replica, None)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        period = self._silence_seconds / _CHECKS
        checked_at = time.monotonic()
        while not self._closed.wait(period):
            # Not more than two periods: this process was stopped itself, and its replicas perhaps.
            elapsed = min(time.monotonic() - checked_at, 2 * period)
            checked_at = time.monotonic()
            with self._lock:
                checks = list(self._checks.items())
            for replica, check in checks:
                reason = check.run(elapsed, self._silence_seconds, self._stall_seconds)
                if reason is not None:
                    self.forget(replica)
                    self._on_hang(replica, reason)


class _HealthCheck:
    """A replica, and the heartbeat it was asked for."""

    def __init__(self, replica: RayRank) -> None:
        self._replica = replica
        self._answer: Future[float] | None = None
        self._silent_seconds = 0.0

    def run(self, elapsed: float, silence_seconds: float, stall_seconds: float) -> str | None:
        """The reason why the replica counts as hung; None while it does not. ``elapsed``: seconds
        since the last check."""
        answer = self._answer
        if answer is not None and not answer.done():
            self._silent_seconds += elapsed
            if self._silent_seconds > silence_seconds:
                return f"no sign of life for {self._silent_seconds:.0f} s (heartbeat_seconds)"
            return None
        if answer is not None and answer.exception() is not None:
            return None  # it is dead, which is heard of elsewhere
        if answer is not None and (busy := answer.result()) > stall_seconds:
            return f"{busy:.0f} s in one step or call (stall_seconds)"
        self._answer = self._replica.heartbeat()
        self._silent_seconds = 0.0
        return None
