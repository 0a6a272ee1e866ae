"""A stream of rollouts in the order of plain decoding, which speculation does not change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Self

from rollout.engine.call_guard import CallGuard
from rollout.types import FinishReason, Request, Rollout


class StreamOrder:
    """Hands out rollouts in the order plain decoding would have finished them.

    Plain decoding, as modelled here: requests take one of ``max_running`` machines in the order of
    their arrival, as one frees; each holds it for as many ticks as it emits tokens; whoever ends
    first comes first, of those that end together the one that arrived first. So the order is a
    function of the lengths alone: neither drafts nor admission nor what else runs can be seen in
    it, nor how fast any of it was.

    Serving a fixed list on equal machines is monotone: longer requests make no start earlier
    (Graham 1969), so what the unfinished ones have emitted bounds from below when they end. A
    request is *placed* once its start is known: all before it are placed, and a machine they leave
    is free at a time that no placed request still running can beat, for that one ends at its
    start + tokens so far + 1 at the earliest. One that has ended may be handed out when none of
    those can come before it; those not placed yet start no earlier than they can end, so they
    cannot either. Nothing could be handed out sooner without knowing what is not emitted yet.

    A check costs O(max_running), and a request O(log max_running) once.
    """

    def __init__(self, num_requests: int, max_running: int, emitted: Callable[[int], int]) -> None:
        """Requests are numbered [0, num_requests) as they arrive.

        ``emitted(index)``: tokens of an unfinished request so far. Never falls.
        """
        self._num_requests = num_requests
        self._emitted = emitted
        self._num_placed = 0
        self._free = [0] * max_running  # heap: when each machine that nobody placed holds was left
        self._running: dict[int, int] = {}  # placed and unfinished: index -> start
        self._ended: dict[int, int] = {}  # not placed yet: index -> ticks
        self._held: list[tuple[int, int]] = []  # heap: (end, index), placed, to be handed out
        self._aborted: set[int] = set()  # not for release() to hand out

    def end(self, index: int, ticks: int) -> None:
        """Note that a request ended after ``ticks`` steps of plain decoding.

        As many as its tokens; one more where the last gave none, as when it failed.
        """
        start = self._running.pop(index, None)
        if start is None:
            self._ended[index] = ticks
        else:
            self._leave(index, start, ticks)

    def abort(self, index: int, emitted: int) -> None:
        """Note that a request was ended from outside, after ``emitted`` tokens.

        Whoever calls hands it out at once: `release` will not. To the others it counts as ended
        with its next token, the least that was assumed of it, so what was handed out stays right.
        """
        self._aborted.add(index)
        self.end(index, emitted + 1)

    def release(self) -> list[int]:
        """The requests to hand out now, in order: each once, all of them when all have ended."""
        earliest = min(
            ((start + self._emitted(index) + 1, index) for index, start in self._running.items()),
            default=None,
        )
        while self._num_placed < self._num_requests and self._free:
            start = self._free[0]
            if earliest is not None and earliest[0] < start:
                break
            heappop(self._free)
            index = self._num_placed
            self._num_placed += 1
            ticks = self._ended.pop(index, None)
            if ticks is not None:
                self._leave(index, start, ticks)
                continue
            self._running[index] = start
            end = (start + self._emitted(index) + 1, index)
            earliest = end if earliest is None else min(earliest, end)
        released = []
        while self._held and (earliest is None or self._held[0] < earliest):
            released.append(heappop(self._held)[1])
        return released

    def _leave(self, index: int, start: int, ticks: int) -> None:
        heappush(self._free, start + ticks)
        if index in self._aborted:
            self._aborted.remove(index)
        else:
            heappush(self._held, (start + ticks, index))


class RolloutStream(Iterator[Rollout]):
    """The rollouts of one `RolloutEngine.stream`, for one thread at a time, but for any.

    Taking the next one is a call of the engine: refused while another thread is in one, the stream
    goes on later. Leaving never is.
    """

    def __init__(self, rollouts: Generator[Rollout, None, None], calls: CallGuard) -> None:
        self._rollouts = rollouts
        self._calls = calls
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Rollout:
        with self._calls:
            try:
                return next(self._rollouts)
            finally:
                if self._closed:  # by somebody else, meanwhile
                    self._rollouts.close()

    def close(self) -> None:
        """Abort what is unfinished: now, or as soon as the call that another thread is in ends."""
        if not self._closed:
            self._closed = True
            self._calls.defer(self._leave)

    def __del__(self) -> None:
        self.close()

    def _leave(self) -> None:
        if inspect.getgeneratorstate(self._rollouts) != inspect.GEN_RUNNING:
            self._rollouts.close()


def in_order_of_plain_decoding(
    requests: Sequence[Request], max_running: int, steps: Iterable[list[Rollout]]
) -> Iterator[Rollout]:
    """Yield each rollout as soon as no other can come before it.

    Aborted ones come at once. When a step raises, those held back come before the error: they are
    whole, though their order is not certain.

    Args:
        requests: in the order of their arrival; their tokens grow as steps go by.
        max_running: how many of them plain decoding would run at a time.
        steps: what ended in each step.
    """
    index_of = {request.request_id: index for index, request in enumerate(requests)}
    order = StreamOrder(
        len(requests),
        max_running,
        lambda index: len(requests[index].tokens) - requests[index].prompt_len,
    )
    held: dict[int, Rollout] = {}
    try:
        for ended in steps:
            # All is booked before anything is handed out: meanwhile the consumer may run steps.
            ready = []
            for rollout in ended:
                index, emitted = index_of[rollout.request_id], len(rollout.token_ids)
                if rollout.finish_reason is FinishReason.ABORT:
                    order.abort(index, emitted)
                    ready.append(rollout)
                    continue
                # A step without a token: the one it failed in.
                order.end(index, emitted + (rollout.finish_reason is FinishReason.ERROR))
                held[index] = rollout
            if held:
                ready += [held.pop(index) for index in order.release()]
            yield from ready
    except Exception:
        for index in sorted(held):
            yield held[index]
        raise
