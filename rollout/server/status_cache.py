"""The engine's latest status, for whoever must not wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollout.engine.metrics import EngineStatus
from rollout.engine.protocol import Engine

_WAIT_SECONDS = 0.25
_FRESH_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class KnownStatus:
    """``status``: as it was ``age`` seconds ago."""

    status: EngineStatus
    age: float


class StatusCache:
    """The engine's last status. Used on one event loop.

    A status is taken between two steps, so during an update, a long step or none at all it comes
    late: whoever asks waits a quarter of a second at most, and gets the last one, with its age.
    """

    def __init__(
        self,
        first: EngineStatus,
        call: Callable[[Callable[[Engine], EngineStatus]], Awaitable[EngineStatus]],
    ) -> None:
        """``first``: as it is now. ``call``: runs a function of the engine between two steps."""
        self._call = call
        self._status = first
        self._taken = time.monotonic()
        self._coming: asyncio.Task[None] | None = None

    async def latest(self) -> KnownStatus:
        """Raises what the engine's loop does when it is closed or broken."""
        if time.monotonic() - self._taken > _FRESH_SECONDS:
            if self._coming is None or self._coming.done():
                self._coming = asyncio.create_task(self._take())
            done, _ = await asyncio.wait({self._coming}, timeout=_WAIT_SECONDS)
            for task in done:
                task.result()
        return KnownStatus(self._status, time.monotonic() - self._taken)

    async def _take(self) -> None:
        self._status = await self._call(lambda engine: engine.status())
        self._taken = time.monotonic()
