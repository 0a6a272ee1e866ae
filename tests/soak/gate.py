"""Keeps streams of events out while the server is looked at in rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Many pass at once, unless somebody has closed it."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._inside = 0
        self._is_closed = False

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Wait until it is open; it is not closed before this ends."""
        async with self._condition:
            await self._condition.wait_for(lambda: not self._is_closed)
            self._inside += 1
        try:
            yield
        finally:
            async with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Let nobody in, and wait until all who are inside have left."""
        async with self._condition:
            self._is_closed = True
            await self._condition.wait_for(lambda: self._inside == 0)
        try:
            yield
        finally:
            async with self._condition:
                self._is_closed = False
                self._condition.notify_all()
