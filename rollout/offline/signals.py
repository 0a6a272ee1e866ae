"""Stopping between two steps: the first Ctrl-C asks, the second insists."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopSignals:
    """While the context lasts, SIGINT and SIGTERM are noted in ``received`` instead of raised.

    A second one finds the former handlers in place. Off the main thread, where Python allows no
    handlers, nothing is noted.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()
