"""The result of a job, the summary of its run, and the jobs of a sweep in one table."""

from __future__ import annotations

import enum
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.engine.empty_outputs import are_many_empty
from rollout.engine.metrics import EngineMetrics


@dataclass(kw_only=True, slots=True)
class Summary:
    """The totals of one run; a resumed job's earlier runs count only in ``resumed``."""

    output: Path  # where the rollouts are
    rollouts: int = 0
    resumed: int = 0  # rollouts that were in the output already
    skipped_prompts: int = 0
    empty: int = 0  # rollouts without text
    remedy: str = ""  # where those are many
    replicas: int = 1  # engines side by side, whose times `metrics` adds up
    seconds: float = 0.0  # of generation
    corpus: str = ""
    corpus_was_empty: bool = False  # at the start, and is saved
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    log: Path | None = None  # the run's log

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of generation."""
        return self.metrics.generated_tokens / self.seconds if self.seconds else 0.0

    def print(self, console: Console) -> None:
        table = Table(title="summary", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in self.lines():
            table.add_row(name, Text(value))  # no markup: paths and stops have brackets
        console.print(table)
        if self.log is not None:
            more = f"more: specrollout report {shlex.quote(str(self.log))}"
            console.print(more, soft_wrap=True, highlight=False, markup=False)

    def lines(self) -> list[tuple[str, str]]:
        tokens = self.metrics.generated_tokens
        empty: list[tuple[str, str]] = []
        if are_many_empty(self.empty, self.rollouts):
            empty = [("without text", f"{self.empty:,}: the model stopped at once; {self.remedy}")]
        return [
            ("rollouts", f"{self.rollouts:,} in {self.output}{self._beside()}"),
            *empty,
            ("tokens", f"{tokens:,} generated in {self.seconds:.1f} s: "
                       f"{self.tokens_per_second:,.0f} tokens/s"),
            ("accept length", f"{self.metrics.accept_length:.3f} tokens per target forward of a "
                              "request"),
            ("speculation", self._speedup()),
            *([("corpus", self.corpus)] if self.corpus else []),
        ]  # fmt: skip

    def _beside(self) -> str:
        resumed = f"; {self.resumed:,} from earlier runs" if self.resumed else ""
        skipped = f"; {self.skipped_prompts:,} prompts skipped" if self.skipped_prompts else ""
        return resumed + skipped

    def _speedup(self) -> str:
        metrics = self.metrics
        saving = metrics.saving(self.seconds, self.replicas)
        if metrics.drafted and not metrics.forecast_steps:
            return "speedup not measured (spec.budget=learned measures it)"
        text = str(saving) if metrics.drafted else "nothing was drafted"
        if self.corpus_was_empty and not saving.is_significant:
            text += "; the corpus starts empty, the next epoch drafts from it"
        return text


class JobStatus(enum.Enum):
    """The way in which a job ended."""

    COMPLETED = "completed"
    NOTHING_TO_DO = "nothing to do"  # the output was complete already
    STOPPED = "stopped"  # by a signal; the same job goes on where it stopped
    FOLLOWED = "followed"  # this rank followed rank 0, which did the job


@dataclass(frozen=True, slots=True)
class JobResult:
    status: JobStatus
    output: Path
    summary: Summary | None = None  # None when there was nothing to do
    signal: signal.Signals | None = None  # when stopped


class SweepTable:
    """The jobs of a sweep beside each other."""

    def __init__(self) -> None:
        self._rows: list[tuple[Sequence[str], JobResult | None]] = []

    def add(self, overrides: Sequence[str], result: JobResult | None) -> None:
        self._rows.append((overrides, result))

    def print(self, console: Console) -> None:
        """Print a row per job, named by what is not the same in all; nothing where there is one."""
        if len(self._rows) < 2:
            return
        common = set.intersection(*(set(overrides) for overrides, _ in self._rows))
        table = Table(
            title="jobs of the sweep",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("job", justify="right")
        table.add_column("settings", overflow="fold")
        for name in ("rollouts", "seconds", "tokens/s", "accept length"):
            table.add_column(name, justify="right")
        for index, (overrides, result) in enumerate(self._rows):
            own = "\n".join(each for each in overrides if each not in common)
            table.add_row(str(index), Text(own), *_cells(result))
        console.print(table)
        for index, (_, result) in enumerate(self._rows):
            if result is not None:
                output = result.output if result.summary is None else result.summary.output
                console.print(
                    f"job {index}: {output}", highlight=False, markup=False, soft_wrap=True
                )
        console.print("specrollout compare says whether drafts pay")


def _cells(result: JobResult | None) -> tuple[str, ...]:
    if result is None:
        return ("failed",)
    summary = result.summary
    if summary is None:
        return (result.status.value,)
    stopped = ", stopped" if result.status is JobStatus.STOPPED else ""
    return (
        f"{summary.rollouts + summary.resumed:,}{stopped}",
        f"{summary.seconds:,.1f}",
        f"{summary.tokens_per_second:,.0f}",
        f"{summary.metrics.accept_length:.3f}",
    )
