"""How often a request that ends is replaced, while none waits."""

from __future__ import annotations

_MEMORY = 32.0  # ends


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
        """In [0, 1]; 0 as long as nothing is known."""
        return min(1.0, self._replaced / (self._ended + 1.0))

    def end(self) -> None:
        """A running request ended, and none waits."""
        self._vacant += 1
        self._ended += 1.0
        if self._ended > _MEMORY:
            self._ended *= 0.5
            self._replaced *= 0.5

    def submit(self, *, is_idle: bool) -> None:
        """A request was submitted. ``is_idle``: none was running or waiting."""
        if is_idle:
            self._vacant = 0
        elif self._vacant:
            self._vacant -= 1
            self._replaced += 1.0
