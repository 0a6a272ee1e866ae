"""How far the job is, on one console: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import rich
import rich.progress
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from rollout.models.loader import Progress as LoadProgress

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


class ConsoleHandler(logging.Handler):
    """Prints through rich's own console, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        text = escape(self.format(record))
        style = _STYLES.get(record.levelno)
        prefix = f"[{style}]{record.levelname.lower()}:[/] " if style else ""
        rich.get_console().print(prefix + text, highlight=False, soft_wrap=True)


log = logging.getLogger(__name__)


class Progress(Protocol):
    def update(self, num_done: int, num_tokens: int, accept_length: float) -> None:
        """After each step. ``num_done`` rollouts of all, ``num_tokens`` generated in this run."""
        ...


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
def open_progress(
    console: Console, total: int, already_done: int, seconds: float
) -> Iterator[Progress]:
    """A bar if ``console`` is a terminal, else log lines ``seconds`` apart."""
    if not console.is_terminal:
        yield _Lines(total, already_done, seconds)
        return
    columns = (
        BarColumn(bar_width=None),  # as much as the text leaves
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
    )
    with rich.progress.Progress(*columns, console=console, expand=True) as bar:
        yield _Bar(bar, total, already_done)


class _Rates:
    """Speeds since the start of this run."""

    def __init__(self, total: int, already_done: int) -> None:
        self._started = time.perf_counter()
        self._total = total
        self._already_done = already_done

    def text(self, num_done: int, num_tokens: int, accept_length: float) -> str:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        per_second = (num_done - self._already_done) / seconds
        left = (self._total - num_done) / per_second if per_second else None
        return (
            f"{per_second:.2f} rollouts/s  {num_tokens / seconds:.0f} tokens/s  "
            f"accept length {accept_length:.2f}  ETA {'-:--' if left is None else _clock(left)}"
        )


class _Bar:
    def __init__(self, bar: rich.progress.Progress, total: int, already_done: int) -> None:
        self._bar = bar
        self._rates = _Rates(total, already_done)
        self._task = bar.add_task("", total=total, completed=already_done, rates="")

    def update(self, num_done: int, num_tokens: int, accept_length: float) -> None:
        rates = self._rates.text(num_done, num_tokens, accept_length)
        self._bar.update(self._task, completed=num_done, rates=rates)


class _Lines:
    def __init__(self, total: int, already_done: int, seconds: float) -> None:
        self._total = total
        self._seconds = seconds
        self._rates = _Rates(total, already_done)
        self._shown_at = time.perf_counter()

    def update(self, num_done: int, num_tokens: int, accept_length: float) -> None:
        now = time.perf_counter()
        if now - self._shown_at >= self._seconds:
            self._shown_at = now
            rates = self._rates.text(num_done, num_tokens, accept_length)
            log.info("%d/%d  %s", num_done, self._total, rates)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
