"""Requests that are in flight for certain when they are cut."""

from __future__ import annotations

from typing import Any

import ray


def hold(server: Any) -> None:
    """Have a server's engine pause once a request has some of its tokens.

    What runs then, and what comes after it, is held until a cut or `resume_generation`.
    """

    def hold_in_actor(actor: Any) -> None:
        loop = actor._engine.loop

        def look(engine: Any) -> None:
            if any(request.token_ids for request in engine.scheduler.running):
                engine.pause_generation("in_place")
            else:
                loop.call(look)  # after one step at most

        loop.call(look)

    ray.get(server.__ray_call__.remote(hold_in_actor))
