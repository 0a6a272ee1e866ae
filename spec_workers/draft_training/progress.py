"""How far a training run is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from spec_workers.draft_training.training_run import RunProgress


class Progress(Protocol):
    def __call__(self, progress: RunProgress, /) -> None:
        """After each step."""
        ...


@contextmanager
def open_progress(
    console: Console, total_seconds: float, line_seconds: float
) -> Iterator[Progress]:
    """A bar if ``console`` is a terminal, else lines ``line_seconds`` apart."""
    if not console.is_terminal:
        yield _Lines(console, total_seconds, line_seconds)
        return
    columns = (BarColumn(bar_width=None), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    with rich.progress.Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("", total=total_seconds, text="")
        yield lambda progress: bar.update(task, completed=progress.seconds, text=_text(progress))


class _Lines:
    def __init__(self, console: Console, total_seconds: float, line_seconds: float) -> None:
        self._console = console
        self._total_seconds = total_seconds
        self._line_seconds = line_seconds
        self._shown_at = float("-inf")

    def __call__(self, progress: RunProgress) -> None:
        now = time.perf_counter()
        if now - self._shown_at < self._line_seconds:
            return
        self._shown_at = now
        left = max(0, round(self._total_seconds - progress.seconds))
        self._console.print(
            f"{_text(progress)}  ETA {left // 60}:{left % 60:02}", highlight=False, soft_wrap=True
        )


def _text(progress: RunProgress) -> str:
    agreement = "/".join(f"{share:.0%}" for share in progress.agreement)
    best = "-" if progress.best is None else f"{progress.best.accept_length:.2f}"
    return (
        f"step {progress.step}  epoch {progress.epoch}  loss {progress.loss:.3f}  "
        f"agrees {agreement}  accept length {best}"
    )
