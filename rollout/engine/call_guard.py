"""Admits one thread at a time to an engine's calls."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, TypeVar, cast

from rollout.errors import EngineStateError

M = TypeVar("M", bound=Callable[..., Any])


_PATIENCE_SECONDS = 1.0
"""Seconds to wait for another thread's call: enough for a short one, and for the finalizers in
it."""


class CallGuard:
    """The lock of an engine's public calls: two threads never hold it together.

    An engine belongs to no thread: any may call while no other one is in a call, and the thread
    that is may call again from inside (a generator of weights asks for the version), but not from
    inside of a step: only a signal handler or a finalizer can come to that, and would change what
    the step is in the middle of.
    """

    def __init__(self, *, holds_interrupts: bool) -> None:
        """``holds_interrupts``: Ctrl-C in a step takes effect when the step has ended.

        Python's handler is replaced at a call's first step and restored when the call ends, since
        replacing it costs microseconds. Between the steps of a call both handlers do the same.
        """
        self.driver: int | None = None  # the thread that waits instead of being refused
        self._may_hold_interrupts = holds_interrupts
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._depth = 0  # calls inside each other; written by the thread that holds the lock
        self._in_step = False  # written by the thread that holds the lock
        self._holds_interrupts = False  # Python's handler is replaced
        self._interrupts = 0  # held back
        self._deferred: deque[Callable[[], None]] = deque()  # any thread appends

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            seconds = -1 if threading.get_ident() == self.driver else _PATIENCE_SECONDS
            if not self._lock.acquire(timeout=seconds):
                raise EngineStateError(self._why_held)
        if self._in_step:
            self._lock.release()
            raise EngineStateError(
                "the engine is in the middle of a step: a signal handler or a finalizer must not "
                "call it; note it there and call between two steps"
            )
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._end_call()
        self._lock.release()
        if self._deferred:
            self._run_deferred()

    def defer(self, function: Callable[[], None]) -> None:
        """Run ``function`` now or, where a call is under way in any thread, when that call ends.

        Never refused.
        """
        self._deferred.append(function)
        self._run_deferred()

    def begin_step(self) -> None:
        """Begin a step inside a call: until `end_step` no other call begins, and Ctrl-C takes no
        effect."""
        if (
            self._may_hold_interrupts
            and not self._holds_interrupts
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._holds_interrupts = True
            signal.signal(signal.SIGINT, self._hold_interrupt)
        self._interrupts = 0
        self._in_step = True

    def end_step(self) -> None:
        """Raises KeyboardInterrupt where one was held back."""
        self._in_step = False
        if self._interrupts:
            raise KeyboardInterrupt

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Guard a change of the engine's books that is no step against Ctrl-C."""
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    def _hold_interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Hold back the first interrupt of a step, which would leave a part of the books written.

        A second one is raised at once: the step may hang. So is one that comes between steps.
        """
        self._interrupts += 1
        if self._interrupts > 1 or not self._in_step:
            raise KeyboardInterrupt

    def _end_call(self) -> None:
        self._depth -= 1
        if self._holds_interrupts and not self._depth:
            self._holds_interrupts = False
            previous = signal.signal(signal.SIGINT, signal.default_int_handler)
            if previous != self._hold_interrupt:  # set by the user meanwhile
                signal.signal(signal.SIGINT, previous)

    def _run_deferred(self) -> None:
        """Run deferred functions, unless a call is under way: that one runs them when it ends."""
        while self._deferred and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return
                self._depth += 1
                try:
                    while self._deferred:
                        self._deferred.popleft()()
                finally:
                    self._end_call()
            finally:
                self._lock.release()

    @property
    def _why_held(self) -> str:
        if os.getpid() != self._process:
            return (
                "the engine was in a call of another thread when this process was forked: make an "
                "engine in this process"
            )
        return (
            "another thread is in a call of this engine, which one thread at a time may use: wait "
            "for it, or put the engine in an EngineLoop, which many threads may talk to"
        )


def exclusive(method: M) -> M:
    """Guard a public method of an engine by the engine's ``calls``: while another thread is in a
    call, it raises EngineStateError and does nothing."""

    @wraps(method)
    def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with engine.calls:
            return method(engine, *args, **kwargs)

    return cast(M, call)
