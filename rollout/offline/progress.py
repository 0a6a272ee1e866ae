"""How far the job is, on one console: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import rich
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rollout.models.loader import Progress as LoadProgress

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}
_RATES = (
    "{task.fields[rollouts]:.2f} rollouts/s  {task.fields[tokens]:.0f} tokens/s  "
    "accept length {task.fields[accept_length]:.2f}  ETA"
)


class ConsoleHandler(logging.Handler):
    """Prints through rich's own console, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text = escape(self.format(record))
        style = _STYLES.get(record.levelno)
        prefix = f"[{style}]{record.levelname.lower()}:[/] " if style else ""
        rich.get_console().print(prefix + text, highlight=False, soft_wrap=True)


log = logging.getLogger(__name__)


@contextmanager
def loading_model(console: Console, path: str) -> Iterator[LoadProgress]:
    """Says that the model is being loaded and, if ``console`` is a terminal, how far."""
    if not console.is_terminal:
        log.info("loading %s", path)
        yield lambda done, total: None
        return
    with console.status(f"loading {escape(path)}") as status:
        yield lambda done, total: status.update(
            f"loading {escape(path)}: {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"
        )


class JobProgress:
    """A bar if ``console`` is a terminal, else log lines of the same columns."""

    def __init__(self, console: Console, total: int, already_done: int, seconds: float) -> None:
        """``total`` rollouts, of which some are there; ``seconds`` between two log lines."""
        self._texts = (MofNCompleteColumn(), TextColumn(_RATES), TimeRemainingColumn())
        bar = BarColumn(bar_width=None)  # as much as the text leaves
        self._bar = Progress(
            bar, *self._texts, console=console, expand=True, disable=not console.is_terminal
        )
        self._bar.add_task(
            "", total=total, completed=already_done, rollouts=0.0, tokens=0.0, accept_length=1.0
        )
        (self._task,) = self._bar.tasks
        self._already_done = already_done
        self._seconds = seconds
        self._started = self._shown_at = time.perf_counter()

    def update(self, num_done: int, num_tokens: int, accept_length: float) -> None:
        """After each step. ``num_done`` rollouts of all, ``num_tokens`` generated in this run."""
        now = time.perf_counter()
        seconds = max(now - self._started, 1e-9)
        self._bar.update(
            self._task.id,
            completed=num_done,
            rollouts=(num_done - self._already_done) / seconds,
            tokens=num_tokens / seconds,
            accept_length=accept_length,
        )
        if self._bar.disable and now - self._shown_at >= self._seconds:
            self._shown_at = now
            texts = (column.render(self._task).plain for column in self._texts)
            log.info("{}  {} {}".format(*texts))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
