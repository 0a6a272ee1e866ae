"""The line that a server logs every few seconds while it has work."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from rollout.weights.versions import TARGET

if TYPE_CHECKING:
    from rollout.server.serving import Serving

log = logging.getLogger(__name__)

_SECONDS = 10.0


async def log_load(serving: Serving, seconds: float = _SECONDS) -> None:
    """Log running and waiting requests, tokens/s, accept length and KV in use every ``seconds``, of
    these seconds, until it is cancelled. Nothing is logged for a time without any work.

    Raises what the engine's loop does when it is closed or broken.
    """
    before, since = (await serving.status_cache.latest()).status.total, time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        known = await serving.status_cache.latest()
        status, taken = known.status, time.monotonic() - known.age
        # Totals fall where a replica has died.
        tokens = max(0, status.total.generated_tokens - before.generated_tokens)
        forwards = status.total.target_forwards - before.target_forwards
        if tokens or serving.num_unfinished:
            log.info(
                "%d running, %d waiting, %.1f tokens/s, accept length %s, KV %.1f %% in use, "
                "weight version %d%s",
                status.running,
                status.waiting,
                tokens / max(taken - since, 1e-9),
                f"{tokens / forwards:.2f}" if forwards else "-",
                100 * status.kv_used / max(status.kv_slots, 1),
                status.weight_versions[TARGET],
                f", nothing runs: {status.unavailable_reason}" if status.unavailable_reason else "",
            )
        before, since = status.total, taken
