"""A stream of rollouts, whose order nothing but the rollouts decides."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Self

from rollout.engine.call_guard import CallGuard
from rollout.engine.stream_order import StreamOrder
from rollout.types import FinishReason, Request, Rollout


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
    requests: Sequence[Request], seats: int, steps: Iterable[list[Rollout]]
) -> Iterator[Rollout]:
    """Each rollout as soon as no other can come before it.

    Aborted ones come at once. When a step raises, those held back come before the error: they are
    whole, though their order is not certain.

    Args:
        requests: in the order of their arrival; their tokens grow as steps go by.
        seats: how many of them plain decoding would run at a time.
        steps: what ended in each step.
    """
    places = {request.request_id: place for place, request in enumerate(requests)}
    order = StreamOrder(
        len(requests), seats, lambda place: len(requests[place].tokens) - requests[place].prompt_len
    )
    held: dict[int, Rollout] = {}
    try:
        for ended in steps:
            # All is booked before anything is handed out: meanwhile the consumer may run steps.
            ready = []
            for rollout in ended:
                place, emitted = places[rollout.request_id], len(rollout.token_ids)
                if rollout.finish_reason is FinishReason.ABORT:
                    order.abort(place, emitted)
                    ready.append(rollout)
                    continue
                # A step without a token: the one it failed in.
                order.end(place, emitted + (rollout.finish_reason is FinishReason.ERROR))
                held[place] = rollout
            if held:
                ready += [held.pop(place) for place in order.release()]
            yield from ready
    except Exception:
        for place in sorted(held):
            yield held[place]
        raise
