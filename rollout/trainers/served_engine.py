"""An engine on its loop, as the actors of frameworks serve it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rollout.engine.engine import RolloutEngine
from rollout.engine.engine_loop import EngineLoop
from rollout.errors import WeightUpdateError
from rollout.types import Prompt, Rollout, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")


class ServedEngine:
    """An engine on a thread of its own, called from one event loop.

    After an update that failed half-way every request gets the reason, one that waits too.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.loop = EngineLoop(engine)
        self.refusal = ""
        """Why there are no weights to serve, until an update succeeds."""

    async def call(self, function: Callable[[RolloutEngine], T]) -> T:
        return await asyncio.wrap_future(self.loop.call(function))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_seed: int,
        partial_ids: Sequence[int] = (),
    ) -> Rollout:
        """One rollout; arguments as for `RolloutEngine.submit`."""
        self.require_weights()
        handle = self.loop.submit(
            prompt, params, request_seed=request_seed, partial_ids=partial_ids
        )
        return await asyncio.wrap_future(handle.future)

    def require_weights(self) -> None:
        """Raises WeightUpdateError after an update that failed half-way."""
        if self.refusal:
            raise WeightUpdateError(f"no weights to serve: {self.refusal}")

    async def update(self, function: Callable[[RolloutEngine], object]) -> None:
        """Call what changes the weights. Where it fails and they are torn, requests are refused."""
        try:
            await self.call(function)
        except BaseException:
            await self.refuse_if_torn()
            raise

    async def refuse_if_torn(self) -> None:
        """Refuse requests, and abort those that wait, if the weights are torn."""
        self.refusal = await self.call(lambda engine: engine.torn_reason)
        if self.refusal:
            log.error("nothing is served: %s", self.refusal)
            await asyncio.wrap_future(self.loop.abort_all())

    async def release(self, tags: Iterable[str], *, keep_weights: bool) -> None:
        """Release memory; what is released already stays so, for frameworks may ask again."""

        def release(engine: RolloutEngine) -> None:
            held = [tag for tag in tags if tag not in engine.released_tags]
            engine.release_memory(held, keep_weights=keep_weights)

        await self.call(release)

    async def resume(self, tags: Iterable[str]) -> None:
        """Take back the memory of those tags that are released."""
        await self.call(
            lambda engine: engine.resume_memory(
                [tag for tag in tags if tag in engine.released_tags]
            )
        )

    def close(self) -> None:
        self.loop.close()
        self._engine.close()
