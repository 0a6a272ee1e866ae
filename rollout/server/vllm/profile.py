"""`/start_profile` and `/stop_profile`: traces of the engine's steps by torch's profiler."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from fastapi import APIRouter
from torch.profiler import ProfilerActivity

from rollout.engine.protocol import Engine
from rollout.errors import EngineStateError, InvalidInputError
from rollout.server.body_fields import CHANGED, Body
from rollout.server.json_route import JsonAnswer, JsonRoute
from rollout.server.serving import Serving
from rollout.server.sglang.control import Answer, change


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=JsonRoute)
    profiler = _Profiler(serving)

    @router.post("/start_profile", responses=CHANGED)
    async def start_profile(body: Body | None = None) -> JsonAnswer:
        """Record what the engine does from now on. Steps take longer meanwhile."""
        return await change(serving, profiler.start)

    @router.post("/stop_profile", responses=CHANGED)
    async def stop_profile(body: Body | None = None) -> JsonAnswer:
        """Write the trace below server.profile_root, for chrome://tracing or Perfetto."""
        return await change(serving, profiler.stop)

    return router


class _Profiler:
    """torch's profiler records the thread that starts it: the engine's."""

    def __init__(self, serving: Serving) -> None:
        self._folder = serving.config.profile_root
        self._num_replicas = serving.num_replicas
        self._running: torch.profiler.profile | None = None

    def start(self, engine: Engine) -> Answer:
        if self._folder is None:
            raise InvalidInputError(
                "server.profile_root", None, "start the server with a folder to write traces to"
            )
        if self._num_replicas > 1:
            raise InvalidInputError(
                "cluster.replicas", self._num_replicas, "run elsewhere: profile a server of one"
            )
        if self._running is not None:
            raise EngineStateError("a profile is being recorded: /stop_profile ends it")
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        running = torch.profiler.profile(activities=kinds)
        running.start()
        self._running = running
        return {"message": "recording"}

    def stop(self, engine: Engine) -> Answer:
        running, self._running = self._running, None
        if running is None or self._folder is None:
            raise EngineStateError("no profile is being recorded: /start_profile begins one")
        running.stop()
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}.trace.json"
        running.export_chrome_trace(str(path))
        return {"message": f"written to {path}"}
