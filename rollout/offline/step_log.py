"""The counters of every few steps, to a JSONL file and to TensorBoard."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from rollout.engine import RolloutEngine
from rollout.metrics import JsonlMetrics, MetricsWriter, TensorBoardMetrics
from rollout.offline.config import LogConfig


class StepLog:
    def __init__(self, config: LogConfig) -> None:
        self._every = config.every
        self._closing = ExitStack()
        self._writers: list[MetricsWriter] = []
        if config.jsonl is not None:
            self._open(JsonlMetrics(Path(config.jsonl)))
        if config.tensorboard is not None:
            self._open(TensorBoardMetrics(Path(config.tensorboard)))

    def _open(self, writer: MetricsWriter) -> None:
        self._closing.callback(writer.close)
        self._writers.append(writer)

    def write(self, engine: RolloutEngine, num_rollouts: int) -> None:
        """Log the engine's latest step, if it is one of every ``log.every``."""
        step = engine.last_step
        if not self._writers or step.step % self._every:
            return
        total = engine.metrics()
        values: dict[str, float] = {
            **asdict(step),
            "accept_length": step.accept_length,
            "rollouts": num_rollouts,
            "total_generated_tokens": total.generated_tokens,
            "total_accept_length": total.accept_length,
            "saved_seconds": total.saved_seconds or 0.0,
            "preemptions": total.preemptions,
            "peak_memory_bytes": total.peak_memory_bytes,
            **engine.worker.counters(),
        }
        del values["step"]
        for writer in self._writers:
            writer.write(step.step, values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.close()
