"""The way from samples to a response, the same for every dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fastapi import Request, Response

from rollout.server.json_route import json_response
from rollout.server.serving import Serving
from rollout.server.streams import (
    DeltaStream,
    EventStream,
    SampleRequest,
    open_stream,
    while_connected,
)
from rollout.types import Rollout

Whole = Callable[[list[Rollout]], Any]
"""Writes the rollouts of all samples as one JSON object."""

Parts = Callable[[DeltaStream], AsyncGenerator[dict[str, Any], None]]
"""Writes tokens as they come as events."""


async def respond(
    request: Request,
    serving: Serving,
    samples: Sequence[SampleRequest],
    whole: Whole,
    parts: Parts | None = None,
) -> Response:
    """Generate the samples, and answer with ``parts`` if given, else with ``whole``.

    Raises what `Serving.generate` does; ClientDisconnect when the client has left.
    """
    if parts is not None:
        await while_connected(request, serving.prepare(samples))
        deltas = await open_stream(request, serving.stream(samples))
        return EventStream(parts(deltas), deltas)
    rollouts = await while_connected(request, serving.generate(samples))
    return await json_response(lambda: whole(rollouts))
