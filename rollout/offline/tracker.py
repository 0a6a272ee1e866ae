"""Experiment trackers, which show the counters of a run's steps beside those of other runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.errors import MetricsError
from rollout.offline.config import Tracker

PROJECT = "specrollout"
"""The project of runs, for trackers that need one and where no environment variable names it."""


@dataclass(frozen=True, slots=True)
class TrackerRun:
    log: Callable[[dict[str, float], int], None]  # counters by name, and their step
    close: Callable[[], None]


def open_tracker(
    tracker: Tracker, folder: Path, name: str, settings: Mapping[str, Any]
) -> TrackerRun:
    """A new run of ``tracker``. Where it goes is the tracker's own configuration.

    Args:
        folder: TensorBoard's event files are written here; other trackers have places of their own.
        name: the run's, for people.
        settings: JSON-able; shown beside the run.

    Raises MetricsError with the tracker's own reason, as the run's calls do: no key, no server, ...
    """
    with _named(tracker, "cannot be opened"):
        run = _OPENERS[tracker](folder, name, dict(settings))

    def log(values: dict[str, float], step: int) -> None:
        with _named(tracker, "takes no more values"):
            run.log(values, step)

    def close() -> None:
        with _named(tracker, "cannot be closed"):
            run.close()

    return TrackerRun(log, close)


@contextmanager
def _named(tracker: Tracker, problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each tracker has classes of its own
        raise MetricsError(f"log.tracker={tracker} {problem}: {error}") from error


def _tensorboard(folder: Path, name: str, settings: dict[str, Any]) -> TrackerRun:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def log(values: dict[str, float], step: int) -> None:
        for counter, value in values.items():
            writer.add_scalar(counter, value, step)

    return TrackerRun(log, writer.close)


def _wandb(folder: Path, name: str, settings: dict[str, Any]) -> TrackerRun:
    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    run = wandb.init(project=project, name=name, config=settings)
    return TrackerRun(run.log, run.finish)


def _trackio(folder: Path, name: str, settings: dict[str, Any]) -> TrackerRun:
    import trackio

    run = trackio.init(PROJECT, name=name, config=settings)
    return TrackerRun(run.log, run.finish)


def _mlflow(folder: Path, name: str, settings: dict[str, Any]) -> TrackerRun:
    import mlflow

    mlflow.start_run(run_name=name)
    mlflow.log_params(settings)

    def log(values: dict[str, float], step: int) -> None:
        # Into a database of this machine, a call that waits takes 34 ms.
        mlflow.log_metrics(values, step, synchronous=False)

    return TrackerRun(log, mlflow.end_run)


_OPENERS: dict[Tracker, Callable[[Path, str, dict[str, Any]], TrackerRun]] = {
    Tracker.tensorboard: _tensorboard,
    Tracker.wandb: _wandb,
    Tracker.trackio: _trackio,
    Tracker.mlflow: _mlflow,
}
