"""Requests that wait for a row, and the order in which they are offered one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rollout.memory.cache import CacheMemory
from rollout.types import Request

WINDOW = 64
"""Requests compared at a time: bounds the cost of one step."""

MAX_OVERTAKEN = WINDOW
"""Requests that queued later but may be admitted first. After that many, it is this one's turn.

The shortest of a window is to run last, so each of the others may pass it; fewer would cut
longest-first short. It bounds the wait when longer ones, or ones with a cached prefix, keep coming.
"""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place in the queue."""

    request: Request
    tokens: np.ndarray  # int32, the request's, fixed while it waits
    prompt: bytes  # of its prompt tokens: equal for samples of one prompt
    first: bool  # never admitted before
    overtaken: int = 0


class WaitingQueue:
    def __init__(self) -> None:
        self._tickets: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    def push(self, ticket: Ticket) -> None:
        self._tickets.append(ticket)

    def push_front(self, ticket: Ticket) -> None:
        """For a request that was running: it is next."""
        ticket.overtaken = MAX_OVERTAKEN
        self._tickets.insert(0, ticket)

    def remove(self, request_id: int) -> Request | None:
        for index, ticket in enumerate(self._tickets):
            if ticket.request.request_id == request_id:
                del self._tickets[index]
                return ticket.request
        return None

    def clear(self) -> list[Request]:
        requests = [ticket.request for ticket in self._tickets]
        self._tickets.clear()
        return requests

    def candidates(
        self,
        memory: CacheMemory,
        prefilling: set[bytes],
        expected_remaining: Callable[[Request], float],
    ) -> list[Ticket]:
        """Who may be admitted now, in order: those with most tokens expected to come first.

        That is longest-processing-time-first (Graham 1969): a batch ends with its last rollout, so
        a long one must not be the last to start. Equals, as samples of one prompt are, come by the
        longest cached prefix, then as they came. Who has been overtaken too often comes before all
        others. A sample whose prompt is being prefilled, by a running request (``prefilling``) or
        by one earlier in the queue, is left out: it waits to find that prefix cached.
        """
        prefilling = set(prefilling)
        ranked: list[tuple[bool, float, int, Ticket]] = []
        for ticket in self._tickets:
            if memory.shares_prefixes and ticket.prompt in prefilling:
                continue
            cached_len = memory.cached_len(ticket.tokens)
            if cached_len < ticket.request.prompt_len - 1:
                prefilling.add(ticket.prompt)
            in_turn = ticket.overtaken < MAX_OVERTAKEN
            if in_turn:
                ranked.append((True, -expected_remaining(ticket.request), -cached_len, ticket))
            else:
                ranked.append((False, 0.0, 0, ticket))
            if len(ranked) == WINDOW:
                break
        ranked.sort(key=lambda rank: rank[:3])
        return [ticket for *_, ticket in ranked]

    def take(self, ticket: Ticket) -> None:
        """``ticket`` was admitted: out of the queue, past everyone before it."""
        for index, earlier in enumerate(self._tickets):
            if earlier is ticket:
                del self._tickets[index]
                return
            earlier.overtaken += 1
        raise AssertionError("the ticket is not in the queue")
