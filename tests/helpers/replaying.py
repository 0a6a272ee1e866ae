"""A stand-in for CUDA graphs: what was captured is run again, on whatever its tensors hold then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout.config import EngineConfig
from rollout.engine.worker_factory import WorkerFactory
from rollout.models.checkpoint import Progress
from rollout.runner.graphs.capture import GraphTooLargeError
from spec_workers.none import PlainWorker
from spec_workers.target import TargetWorker


@dataclass(kw_only=True)
class Replay:
    run: Callable[[], None]
    num_bytes: int
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.run()


class ReplayingCapture:
    """A capture takes ``num_bytes``, or is refused, and the one numbered ``fails_at`` fails."""

    def __init__(self, num_bytes: int = 1000, fails_at: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.fails_at = fails_at
        self.captures: list[Replay] = []
        self.resets = 0

    def __call__(self, run: Callable[[], None], max_bytes: int | None = None) -> Replay:
        if len(self.captures) == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        run()
        if max_bytes is not None and self.num_bytes > max_bytes:
            raise GraphTooLargeError(self.num_bytes)
        self.captures.append(Replay(run=run, num_bytes=self.num_bytes))
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
