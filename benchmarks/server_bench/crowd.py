"""Malformed requests sent by many clients at once, and what became of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass

from .malformed import BadRequest, Manner
from .raw_client import Answer, send


@dataclass(frozen=True, slots=True)
class Outcome:
    request: BadRequest
    answer: Answer | None  # None: there was neither an answer nor an end to the connection

    @property
    def status(self) -> int | None:
        return None if self.answer is None else self.answer.status

    @property
    def trouble(self) -> str:
        """What the server did that it must not do; empty when it did well."""
        if self.answer is None:
            return "no answer"
        status = self.answer.status
        if status is None:
            waits = self.request.manner is Manner.WAITS
            return "closed without an answer" if waits and not self.answer.body else ""
        if status >= 500 and status != 501:
            return f"status {status}"
        has_body = not self.request.raw.startswith(b"HEAD ")
        return "cut short" if has_body and not self.answer.is_whole else ""


async def send_all(
    port: int,
    requests: Iterable[BadRequest],
    *,
    num_clients: int,
    timeout: float,
    seed: int = 0,
) -> list[Outcome]:
    """Each over a connection of its own, ``num_clients`` at a time; in order.

    ``timeout``: seconds one client waits for its answer.
    """
    randomness = random.Random(seed)
    room = asyncio.Semaphore(num_clients)

    async def send_one(request: BadRequest, leave_after: float | None) -> Outcome:
        async with room:
            try:
                answer = await send(
                    port, request.raw, timeout=timeout,
                    ends=request.manner is Manner.ENDS, leave_after=leave_after,
                )  # fmt: skip
            except TimeoutError:
                return Outcome(request, None)
        return Outcome(request, answer)

    def patience(request: BadRequest) -> float | None:
        return randomness.uniform(0, 0.05) if request.manner is Manner.LEAVES else None

    return await asyncio.gather(*(send_one(each, patience(each)) for each in requests))
