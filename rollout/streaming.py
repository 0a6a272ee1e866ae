"""From what ends in each step to a stream whose order nothing but the rollouts decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rollout.stream_order import StreamOrder
from rollout.types import FinishReason, Request, Rollout


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
