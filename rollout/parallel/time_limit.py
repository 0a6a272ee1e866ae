"""Time limits for calls that have none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

ANSWER_SECONDS = 30.0
"""A store of torch.distributed answers in milliseconds, however busy its process is. If its process
is suspended it never does, and torch's client waits forever."""


def on_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Run ``call`` on a thread of its own, which does not keep the process alive."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def within(seconds: float, call: Callable[[], T]) -> T:
    """The value of ``call``, run on a thread of its own. Raises what ``call`` raises.

    Raises TimeoutError after ``seconds``; the thread is then left behind.
    """
    outcome = on_thread("time-limit", call)
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():  # it finished just now, or raised a TimeoutError itself
            return outcome.result()
        raise TimeoutError(f"no answer in {seconds:g} seconds") from None


def answered(call: Callable[[], T], seconds: float = 0.0) -> T:
    """The value of a call to a store that itself waits at most ``seconds`` for others.

    Raises TimeoutError if the store does not answer, and what ``call`` raises.
    """
    return within(seconds + ANSWER_SECONDS, call)
