"""How far a training run is: its progress display, and the plot drawn from its log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from rollout.report.plots.canvas import LIGHT, Theme, legend_beside, render, time_unit
from spec_workers.draft_training.training_log import Record, read_log
from spec_workers.draft_training.training_run import RunProgress

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


PLOT = "training.png"


def plot_training(log: Path, plot: Path) -> None:
    """Raises InvalidInputError where matplotlib is missing or the log cannot be read."""
    records = read_log(log)
    plot.write_bytes(render(lambda figure, theme: _draw(figure, theme, records), LIGHT, (8.0, 6.0)))


def _draw(figure: Figure, theme: Theme, records: list[Record]) -> None:
    steps = [record for record in records if record["event"] == "step"]
    checks = [record for record in records if record["event"] == "held out"]
    unit, name = time_unit(max(record["seconds"] for record in records))
    above, below = figure.subplots(2, 1, sharex=True)

    def times(of: list[Record]) -> list[float]:
        return [record["seconds"] / unit for record in of]

    depth = len(steps[-1]["cross_entropies"]) if steps else 0
    for step in range(depth):
        known = [record for record in steps if step < len(record["cross_entropies"])]
        losses = [record["cross_entropies"][step] for record in known]
        above.plot(times(known), losses, label=f"guess {step + 1}")
    above.set_title("Cross entropy with the target's distribution, nats")
    legend_beside(above)
    below.plot(times(checks), [record["accept_length"] for record in checks], marker="o")
    below.set_title("Accept length on held-out rollouts, tokens per forward")
    below.set_xlabel(f"time of training, {name}")
