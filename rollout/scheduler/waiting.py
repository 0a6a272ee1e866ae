"""The waiting queue and the order of admission, and how often a request that ends is replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.types import Request

WINDOW = 64
"""Waiting requests compared in one step, which bounds its cost."""

MAX_OVERTAKEN = WINDOW
"""How many later requests may be admitted before a waiting one; then it is next.

The shortest of a window should run last, so all others of the window may pass it. The bound ends
the wait when longer requests, or ones with a cached prefix, keep coming.
"""

MIN_SHARED = 32
"""Tokens that a request must save if it is to wait for a prefix that another one computes."""

_MOST_SEEN = 4 * WINDOW  # waiting requests looked at in one step, those that wait for a prefix too

_TOKEN_BYTES = 4

_MEMORY = 32.0  # ends that weigh in a `ReplacementRate`


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A waiting request."""

    request: Request
    tokens: np.ndarray  # int32, all of the request's, fixed while it waits
    prompt: bytes  # its prompt tokens: equal for samples of one prompt
    first: bool  # never admitted before
    overtaken: int = 0  # later requests that were admitted first
    waits: bool = False  # for a prefix that another request computes


class WaitingQueue:
    """Waiting requests in the order of arrival; retracted ones come first."""

    def __init__(self) -> None:
        self._queued: list[QueuedRequest] = []

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._queued)

    def push(self, queued: QueuedRequest) -> None:
        """Add a new request at the end."""
        self._queued.append(queued)

    def push_front(self, queued: QueuedRequest) -> None:
        """Put a request that was running in front: it is admitted next."""
        queued.overtaken = MAX_OVERTAKEN
        self._queued.insert(0, queued)

    def remove(self, request_id: int) -> Request | None:
        """Take a request out of the queue; None if it is not in it."""
        for index, queued in enumerate(self._queued):
            if queued.request.request_id == request_id:
                del self._queued[index]
                return queued.request
        return None

    def clear(self) -> list[Request]:
        """Empty the queue and return its requests in order."""
        requests = [queued.request for queued in self._queued]
        self._queued.clear()
        return requests

    def candidates(
        self,
        memory: KVCacheManager,
        prefilling: Collection[bytes],
        expected_remaining: Callable[[Request], float],
    ) -> list[QueuedRequest]:
        """The requests that may be admitted now, in order: the longest expected ones first.

        This is longest-processing-time-first (Graham 1969): a batch ends with its last rollout, so
        a long one must not start last. Equal ones, such as samples of one prompt, are ordered by
        the longest cached prefix, then by arrival. Requests that were overtaken too often come
        first. A request of which more tokens are being prefilled than are cached, by a running
        request (``prefilling``: their prompts) or by one earlier in the queue, is left out: it
        waits until they are cached.
        """
        under_way = _Prefills(prefilling)
        ranked: list[tuple[bool, float, int, QueuedRequest]] = []
        for queued in islice(self._queued, _MOST_SEEN):
            if memory.shares_prefixes and queued.prompt in under_way.prompts:
                continue
            cached_len = memory.cached_len(queued.tokens)
            if memory.shares_unfinished:
                wanted = cached_len + (1 if queued.waits else MIN_SHARED)
                queued.waits = under_way.begin_with(queued.prompt[: _TOKEN_BYTES * wanted])
                if queued.waits:
                    continue
            if cached_len < queued.request.prompt_len - 1:
                under_way.add(queued.prompt)
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
        """Remove ``queued``, which was admitted; it has overtaken every request before it."""
        for index, earlier in enumerate(self._queued):
            if earlier is queued:
                del self._queued[index]
                return
            earlier.overtaken += 1
        raise AssertionError("the request is not in the queue")


class _Prefills:
    """Prompts that are being computed, looked up by their beginnings."""

    def __init__(self, prompts: Collection[bytes]) -> None:
        self.prompts = set(prompts)
        self._beginnings: dict[int, set[bytes]] = {}  # by their bytes

    def add(self, prompt: bytes) -> None:
        self.prompts.add(prompt)
        for length, beginnings in self._beginnings.items():
            beginnings.add(prompt[:length])

    def begin_with(self, beginning: bytes) -> bool:
        """Whether one of them begins so."""
        length = len(beginning)
        if length not in self._beginnings:
            self._beginnings[length] = {prompt[:length] for prompt in self.prompts}
        return beginning in self._beginnings[length]


class ReplacementRate:
    """The share of ended requests that later ones replaced.

    A client that keeps a number of requests in flight replaces each that ends, and so does a
    server's steady traffic; of a batch that was submitted whole none is replaced. Ends while
    requests wait say nothing, and a request submitted while none runs replaces none.
    """

    def __init__(self) -> None:
        self._ended = self._replaced = 0.0
        self._vacant = 0  # ended and not replaced yet

    @property
    def value(self) -> float:
        """The share of ended requests that was replaced, in [0, 1]; 0 while nothing is known."""
        return min(1.0, self._replaced / (self._ended + 1.0))

    def end(self) -> None:
        """Note that a running request ended while none waited."""
        self._vacant += 1
        self._ended += 1.0
        if self._ended > _MEMORY:
            self._ended *= 0.5
            self._replaced *= 0.5

    def submit(self, *, is_idle: bool) -> None:
        """Note that a request was submitted. ``is_idle``: none was running or waiting."""
        if is_idle:
            self._vacant = 0
        elif self._vacant:
            self._vacant -= 1
            self._replaced += 1.0
