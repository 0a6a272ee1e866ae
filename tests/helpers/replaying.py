"""A stand-in for CUDA graphs: what was captured is run again, on whatever its tensors hold then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout.config import EngineConfig
from rollout.engine.worker_factory import WorkerFactory
from rollout.models.checkpoint import Progress
from rollout.runner.graphs.capture import GraphTooLargeError, Tensors
from spec_workers.none import PlainWorker
from spec_workers.target import TargetWorker


@dataclass(kw_only=True)
class Replay:
    function: Callable[[], Tensors]
    results: Tensors
    num_bytes: int
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.write()

    def write(self) -> None:
        for name, tensor in self.function().items():
            self.results[name].copy_(tensor)


class ReplayingCapture:
    """A capture takes ``num_bytes``, or is refused, and the one numbered ``fails_at`` fails."""

    shares_memory = True

    def __init__(self, num_bytes: int = 1000, fails_at: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.fails_at = fails_at
        self.captures: list[Replay] = []
        self.resets = 0

    def __call__(
        self,
        function: Callable[[], Tensors],
        make_outputs: Callable[[Tensors], Tensors],
        max_bytes: int | None = None,
    ) -> Replay:
        if len(self.captures) == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        replay = Replay(
            function=function, results=make_outputs(function()), num_bytes=self.num_bytes
        )
        replay.write()
        if max_bytes is not None and self.num_bytes > max_bytes:
            raise GraphTooLargeError(self.num_bytes)
        self.captures.append(replay)
        return self.captures[-1]

    def reset(self) -> None:
        self.resets += 1

    @property
    def replays(self) -> int:
        return sum(captured.replays for captured in self.captures)


def plain_factory(capture: ReplayingCapture) -> WorkerFactory:
    def build(config: EngineConfig, progress: Progress | None = None) -> PlainWorker:
        return PlainWorker(TargetWorker(config, progress, capture=capture))

    return build
