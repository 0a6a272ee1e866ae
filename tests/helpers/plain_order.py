"""The order in which plain decoding finishes requests, stepped through."""

from __future__ import annotations

from collections.abc import Sequence


def plain_order(ticks: Sequence[int], max_running: int) -> list[int]:
    """The indices in the order in which they end: ``max_running`` run at a time, in the order
    given, one token per tick each."""
    waiting, running, order = list(range(len(ticks))), {}, []
    while waiting or running:
        while waiting and len(running) < max_running:
            index = waiting.pop(0)
            running[index] = ticks[index]
        lapse = min(running.values())  # nothing happens before
        running = {index: left - lapse for index, left in running.items()}
        order += sorted(index for index, left in running.items() if left == 0)
        running = {index: left for index, left in running.items() if left}
    return order
