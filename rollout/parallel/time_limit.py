"""A time limit for calls that have none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

ANSWER_SECONDS = 30.0
"""A store of torch.distributed answers in milliseconds, however busy its process is. One whose
process is stopped never does, and torch's client waits for it without end."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The value of ``call``, which runs on a thread that is left behind where it takes longer.

    Raises TimeoutError then, and what ``call`` raises.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="time-limit", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():  # at the last moment, or it raised a TimeoutError of its own
            return outcome.result()
        raise TimeoutError(f"no answer in {seconds:g} seconds") from None


def answered(call: Callable[[], T], seconds: float = 0.0) -> T:
    """The value of a call to a store, which waits at most ``seconds`` for others by itself.

    Raises TimeoutError where the store does not answer, and what ``call`` raises.
    """
    return within(seconds + ANSWER_SECONDS, call)
