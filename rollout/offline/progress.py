"""The job's progress on a console: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import rich
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rollout.engine.metrics import EngineMetrics
from rollout.models.checkpoint import Progress as LoadProgress
from rollout.scheduler import LengthForecast
from rollout.types import FinishReason, Request, Rollout

_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}
_UNKNOWN = "-:--:--"
_SECONDS_PER_ESTIMATE = 1.0
_RATES = (
    "{task.fields[rollouts]:.2f} rollouts/s  {task.fields[tokens]:.0f} tokens/s  "
    "accept length {task.fields[accept_length]:.2f}  ETA {task.fields[eta]}"
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


_ENOUGH_ENDED = 3  # rollouts, for an estimate of the others' lengths


class TimeLeft:
    """Estimates the seconds until a job is done.

    Rollouts that end early are short. So the mean length is estimated as the tokens of all, ended
    or running, for each that ended: the maximum likelihood where the chance to end is the same at
    every token. One that runs is expected to get that long, or longer by those that did.
    """

    def __init__(self) -> None:
        self._lengths = LengthForecast()
        self._num_ended = self._num_tokens = 0

    def observe(self, request: Request, rollout: Rollout) -> None:
        """Learn from a rollout that ended."""
        if rollout.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lengths.observe(request.group, len(rollout.token_ids))
            self._num_ended += 1
            self._num_tokens += len(rollout.token_ids)

    def seconds(
        self, unfinished: Collection[Request], num_left: int, metrics: EngineMetrics, passed: float
    ) -> float | None:
        """The seconds left; None before enough rollouts have ended.

        Args:
            unfinished: the requests that the engine has, running or waiting.
            num_left: rollouts that are not done, those of ``unfinished`` included.
            passed: seconds since the engine began with what ``metrics`` counts.
        """
        if self._num_ended < _ENOUGH_ENDED or not metrics.generated_tokens:
            return None
        running = [each for each in unfinished if each.generated_len]
        mean = (self._num_tokens + sum(each.generated_len for each in running)) / self._num_ended
        remaining = []
        for each in running:
            room = max(1, each.remaining_len)
            expected = self._lengths.remaining(each.group, each.generated_len, room)
            remaining.append(min(room, max(expected, mean - each.generated_len)))
        if unfinished:
            mean = min(mean, max(each.params.max_new_tokens for each in unfinished))
        tokens = sum(remaining) + mean * (num_left - len(running))
        # The last rollouts run side by side: no throughput makes the longest of them shorter.
        steps = max(remaining, default=0.0) / max(1.0, metrics.accept_length)
        return passed * max(tokens / metrics.generated_tokens, steps / metrics.steps)


class JobProgress:
    """A bar if ``console`` is a terminal, else log lines of the same columns."""

    def __init__(self, console: Console, total: int, already_done: int, seconds: float) -> None:
        """``total`` rollouts, of which some are there; ``seconds`` between two log lines."""
        self._texts = (MofNCompleteColumn(), TextColumn(_RATES))
        bar = BarColumn(bar_width=None)  # as much as the text leaves
        self._bar = Progress(
            bar, *self._texts, console=console, expand=True, disable=not console.is_terminal
        )
        self._bar.add_task(
            "", total=total, completed=already_done, rollouts=0.0, tokens=0.0, accept_length=1.0,
            eta=_UNKNOWN,
        )  # fmt: skip
        (self._task,) = self._bar.tasks
        self._time_left = TimeLeft()
        self._total = total
        self._already_done = already_done
        self._seconds = seconds
        self._eta, self._eta_at = _UNKNOWN, 0.0
        self._started = self._shown_at = time.perf_counter()

    def ended(self, request: Request, rollout: Rollout) -> None:
        """Learn from a rollout that ended: its length tells of the others'."""
        self._time_left.observe(request, rollout)

    def update(
        self, num_done: int, metrics: EngineMetrics, unfinished: Collection[Request]
    ) -> None:
        """Show the state after a step. ``num_done``: of all rollouts. ``metrics``: of this run."""
        now = time.perf_counter()
        seconds = max(now - self._started, 1e-9)
        if now - self._eta_at >= min(self._seconds, _SECONDS_PER_ESTIMATE):
            self._eta_at = now
            left = self._time_left.seconds(unfinished, self._total - num_done, metrics, seconds)
            self._eta = _UNKNOWN if left is None else str(timedelta(seconds=round(left)))
        self._bar.update(
            self._task.id,
            completed=num_done,
            rollouts=(num_done - self._already_done) / seconds,
            tokens=metrics.generated_tokens / seconds,
            accept_length=metrics.accept_length,
            eta=self._eta,
        )
        if self._bar.disable and now - self._shown_at >= self._seconds:
            self._shown_at = now
            texts = (column.render(self._task).plain for column in self._texts)
            log.info("{}  {}".format(*texts))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
