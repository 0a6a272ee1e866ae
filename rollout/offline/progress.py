"""The job's progress on a console: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Self

import rich
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from rollout.engine.metrics import EngineMetrics
from rollout.models.checkpoint import Progress as LoadProgress

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}
_ESTIMATE_SECONDS = 3600.0  # the ETA's speed is a mean over them, for rollouts end in bursts
_RATES = (
    "{task.fields[rollouts]:.2f} rollouts/s  {task.fields[tokens]:.0f} tokens/s  "
    "accept length {task.fields[accept_length]:.2f}  ETA"
)


class ConsoleHandler(logging.Handler):
    """Prints through rich's own console, above a progress bar if there is one."""

    def __init__(self, *, dated: bool = False) -> None:
        """``dated``: each message begins with the local time, as the log of a service needs it."""
        super().__init__()
        self._dated = dated

    def emit(self, record: logging.LogRecord) -> None:
        text = escape(self.format(record))
        style = _STYLES.get(record.levelno)
        prefix = f"[{style}]{record.levelname.lower()}:[/] " if style else ""
        if self._dated:
            now = time.localtime(record.created)
            prefix = f"{time.strftime('%Y-%m-%d %H:%M:%S', now)} {prefix}"
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


@contextmanager
def reading_prompts(console: Console) -> Iterator[Callable[[int], None]]:
    """Says how many prompts are read: each second on a terminal, else from the first on, ever more
    seldom."""
    started, shown_at = time.perf_counter(), 0.0
    with console.status("reading prompts") if console.is_terminal else nullcontext() as status:

        def tell(num_rows: int) -> None:
            nonlocal shown_at
            seconds = time.perf_counter() - started
            if seconds < max(1.0, 2 * shown_at if status is None else shown_at + 0.2):
                return
            shown_at = seconds
            if status is None:
                log.info("reading prompts: %s", f"{num_rows:,}")
            else:
                status.update(f"reading prompts: {num_rows:,}")

        yield tell


class JobProgress:
    """A bar if ``console`` is a terminal, else log lines of the same columns."""

    def __init__(self, console: Console, total: int, already_done: int, seconds: float) -> None:
        """``already_done`` of ``total`` rollouts; ``seconds`` between two log lines."""
        self._texts = (MofNCompleteColumn(), TextColumn(_RATES), TimeRemainingColumn())
        self._bar = Progress(
            BarColumn(bar_width=None),  # as much as the text leaves
            *self._texts,
            console=console,
            expand=True,
            disable=not console.is_terminal,
            speed_estimate_period=_ESTIMATE_SECONDS,
        )
        self._bar.add_task(
            "", total=total, completed=already_done, rollouts=0.0, tokens=0.0, accept_length=1.0
        )
        (self._task,) = self._bar.tasks
        self._already_done = already_done
        self._seconds = seconds
        self._started = self._shown_at = time.perf_counter()

    def update(self, num_done: int, metrics: EngineMetrics) -> None:
        """Show the state after a step. ``num_done``: of all rollouts. ``metrics``: of this run."""
        now = time.perf_counter()
        seconds = max(now - self._started, 1e-9)
        self._bar.update(
            self._task.id,
            completed=num_done,
            rollouts=(num_done - self._already_done) / seconds,
            tokens=metrics.generated_tokens / seconds,
            accept_length=metrics.accept_length,
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
