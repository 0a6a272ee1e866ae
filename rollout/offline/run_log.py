"""The log of a run: its settings, every few steps, each rollout, and what the engine learned."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from rollout.engine.protocol import Engine
from rollout.engine.tokenizer import prompt_group
from rollout.errors import MetricsError
from rollout.hub import hub_name
from rollout.offline.config import RunConfig
from rollout.offline.paths import JobPaths
from rollout.offline.tracker import TrackerRun, open_tracker
from rollout.types import Rollout

_SECONDS_BETWEEN_SNAPSHOTS = 60.0
_SECONDS_BETWEEN_COUNTERS = 1.0  # an engine's status takes as long as ten lines of the log
_FIRST_BYTES = b'{"kind":'
_encode = msgspec.json.Encoder(enc_hook=np.generic.item).encode  # numpy's scalars as Python's


class JsonlLog:
    """Lines of ``{"kind": "step", "time": <Unix seconds>, ...}``; goes on with a file.

    A line is handed to the operating system whole, so a killed process leaves at most its last one
    torn; the next run starts a new line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _require_log(path)
            torn = _ends_inside_a_line(path)
            self._file = path.open("ab", buffering=0)  # readers see each line at once
        except OSError as error:
            raise self._error(error) from None
        if torn:
            self._append(b"\n")

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Add a line. NaN and infinities, for which JSON has no number, become null."""
        line = {"kind": kind, "time": time.time(), **values}
        self._append(_encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> MetricsError:
        return MetricsError(
            f"log.jsonl={str(self._path)!r} cannot be written: {error.strerror}. Give another "
            "path or none; finished rollouts are safe"
        )


def _require_log(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(len(_FIRST_BYTES))
    if start and start != _FIRST_BYTES:
        raise MetricsError(
            f"log.jsonl={str(path)!r} is no log of a run: give another path, or null"
        )


def _ends_inside_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class RunLog:
    """The log of a run, opened when generation begins. A tracker gets the steps alone.

    Lines by their ``kind``: ``run`` once at the start; ``step`` for one of every ``log.every``;
    ``rollout`` when one ends, before the line of the step it ended in; ``learned`` and ``totals``
    every minute and at the end. `rollout.report` reads them.
    """

    def __init__(self, config: RunConfig, paths: JobPaths, engine: Engine) -> None:
        self._engine = engine
        self._every = config.log.every
        self._closing = ExitStack()
        self._lines: JsonlLog | None = None
        self._tracker: TrackerRun | None = None
        settings = _settings(config, engine)
        if paths.log is not None:
            self._lines = JsonlLog(paths.log)
            self._closing.callback(self._lines.close)
            self._lines.write("run", settings)
        if config.log.tracker is not None:
            name = str(paths.output)
            self._tracker = open_tracker(config.log.tracker, paths.tensorboard, name, settings)
            self._closing.callback(self._tracker.close)
        self._snapshot_at = time.monotonic()
        self._counters: Mapping[str, float] = {}
        self._counters_at = -math.inf
        self._logged_step = -1  # a cluster's step may pass without news

    def rollout(self, rollout: Rollout, submitted_step: int) -> None:
        """Log a rollout that the latest step handed out.

        ``submitted_step``: the latest one when its request was submitted.
        """
        if self._lines is None:
            return
        stats = rollout.stats
        self._lines.write(
            "rollout",
            {
                "step": self._engine.last_step.step,
                "submitted_step": submitted_step,
                "request_id": rollout.request_id,
                "prompt_index": rollout.prompt_index,
                "sample_index": rollout.sample_index,
                # Text, for JSON numbers of 63 bits lose digits in many readers.
                "group": f"{prompt_group(rollout.prompt_ids):016x}",
                "prompt_tokens": len(rollout.prompt_ids),
                "generated_tokens": len(rollout.token_ids),
                "finish_reason": rollout.finish_reason.value,
                **asdict(stats),
                "accept_length": stats.accept_length,
            },
        )

    def step(self, num_rollouts: int) -> None:
        """Log the engine's latest step, if it is one of every ``log.every``."""
        if self._lines is None and self._tracker is None:
            return
        now = time.monotonic()
        if now - self._snapshot_at >= _SECONDS_BETWEEN_SNAPSHOTS:
            self._snapshot()
        step = self._engine.last_step
        if step.step % self._every or step.step == self._logged_step:
            return
        self._logged_step = step.step
        if now - self._counters_at >= _SECONDS_BETWEEN_COUNTERS:
            self._counters, self._counters_at = self._engine.status().counters, now
        total = self._engine.metrics()
        values: dict[str, float] = {
            **asdict(step),
            "accept_length": step.accept_length,
            "rollouts": num_rollouts,
            "total_generated_tokens": total.generated_tokens,
            "total_accept_length": total.accept_length,
            "saved_seconds": total.saved_seconds,
            "saved_error_seconds": total.saved_error_seconds,
            "preemptions": total.preemptions,
            "peak_memory_bytes": total.peak_memory_bytes,
            **self._counters,
        }
        if self._lines is not None:
            self._lines.write("step", values)
        if self._tracker is not None:
            del values["step"]
            named = {f"rollout/{name}": value for name, value in values.items()}
            self._tracker.log(named, step.step)

    def finish(self) -> None:
        """Log the end of a run that ended or was stopped, but not of one that failed."""
        self._snapshot()

    def _snapshot(self) -> None:
        self._snapshot_at = time.monotonic()
        if self._lines is None:
            return
        total = self._engine.metrics()
        derived = {
            "accept_length": total.accept_length,
            "peak_memory_bytes": total.peak_memory_bytes,
        }
        self._lines.write("totals", {**asdict(total), **derived})
        self._lines.write("learned", self._engine.learned())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()


def _settings(config: RunConfig, engine: Engine) -> dict[str, Any]:
    sampling = config.sampling
    return {
        "model": hub_name(config.model.path) or config.model.path,
        "data": config.data.path,
        "output": config.output.path,
        "spec": config.spec,
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
        "max_running": engine.max_running // config.cluster.replicas,
        "exact": config.exact,
        "num_threads": config.num_threads,
        "replicas": config.cluster.replicas,
        "log_every": config.log.every,
    }
