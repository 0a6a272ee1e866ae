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
class QueuedRequest:
    """A request's place in the queue."""

    request: Request
    tokens: np.ndarray  # int32, the request's, fixed while it waits
    prompt: bytes  # of its prompt tokens: equal for samples of one prompt
    first: bool  # never admitted before
    overtaken: int = 0


class WaitingQueue:
    def __init__(self) -> None:
        self._queued: list[QueuedRequest] = []

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._queued)

    def push(self, queued: QueuedRequest) -> None:
        self._queued.append(queued)

    def push_front(self, queued: QueuedRequest) -> None:
        """For a request that was running: it is next."""
        queued.overtaken = MAX_OVERTAKEN
        self._queued.insert(0, queued)

    def remove(self, request_id: int) -> Request | None:
        for index, queued in enumerate(self._queued):
            if queued.request.request_id == request_id:
                del self._queued[index]
                return queued.request
        return None

    def clear(self) -> list[Request]:
        requests = [queued.request for queued in self._queued]
        self._queued.clear()
        return requests

    def candidates(
        self,
        memory: CacheMemory,
        prefilling: set[bytes],
        expected_remaining: Callable[[Request], float],
    ) -> list[QueuedRequest]:
        """Who may be admitted now, in order: those with most tokens expected to come first.

        That is longest-processing-time-first (Graham 1969): a batch ends with its last rollout, so
        a long one must not be the last to start. Equals, as samples of one prompt are, come by the
        longest cached prefix, then as they came. Who has been overtaken too often comes before all
        others. A sample whose prompt is being prefilled, by a running request (``prefilling``) or
        by one earlier in the queue, is left out: it waits to find that prefix cached.
        """
        prefilling = set(prefilling)
        ranked: list[tuple[bool, float, int, QueuedRequest]] = []
        for queued in self._queued:
            if memory.shares_prefixes and queued.prompt in prefilling:
                continue
            cached_len = memory.cached_len(queued.tokens)
            if cached_len < queued.request.prompt_len - 1:
                prefilling.add(queued.prompt)
            in_turn = queued.overtaken < MAX_OVERTAKEN
            if in_turn:
                ranked.append((True, -expected_remaining(queued.request), -cached_len, queued))
            else:
                ranked.append((False, 0.0, 0, queued))
            if len(ranked) == WINDOW:
                break
        ranked.sort(key=lambda rank: rank[:3])
        return [queued for *_, queued in ranked]

    def take(self, queued: QueuedRequest) -> None:
        """``queued`` was admitted: out of the queue, past everyone before it."""
        for index, earlier in enumerate(self._queued):
            if earlier is queued:
                del self._queued[index]
                return
            earlier.overtaken += 1
        raise AssertionError("the request is not in the queue")
