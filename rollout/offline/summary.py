"""The result of a job, the summary of its run, and the jobs of a sweep in one table."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollout.engine.metrics import EngineMetrics


@dataclass(kw_only=True, slots=True)
class Summary:
    """The totals of one run; a resumed job's earlier runs count only in ``resumed``."""

    output: Path
    rollouts: int = 0
    resumed: int = 0  # rollouts that were in the output already
    skipped_prompts: int = 0
    replicas: int = 1  # engines side by side, whose times `metrics` adds up
    load_seconds: float = 0.0  # model, tokenizer, and checking the prompts
    seconds: float = 0.0  # of generation
    first_rollout_seconds: float | None = None  # since generation began
    corpus: list[tuple[str, str]] = field(default_factory=list)  # lines of its own
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of generation."""
        return self.metrics.generated_tokens / self.seconds if self.seconds else 0.0

    def print(self, console: Console) -> None:
        """Print the totals as one table."""
        table = Table(title="summary", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in self.lines():
            table.add_row(name, value)
        console.print(table)

    def lines(self) -> list[tuple[str, str]]:
        """The names of the totals and what is shown of each."""
        metrics = self.metrics
        first = self.first_rollout_seconds
        return [
            ("rollouts", f"{self.rollouts:,}" + self._beside()),
            ("prompt tokens", f"{metrics.prompt_tokens:,}, {metrics.cached_tokens:,} cached"),
            ("generated tokens", f"{metrics.generated_tokens:,}"),
            ("seconds", f"{self.seconds:.1f}, after {self.load_seconds:.1f} to load and check"),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("first rollout after", "-" if first is None else f"{first:.1f} s"),
            ("engine steps", f"{metrics.steps:,}"),
            ("target forwards", f"{metrics.target_forwards:,}, summed over requests"),
            ("accept length", f"{metrics.accept_length:.3f}"),
            ("drafted / accepted", self._drafts()),
            ("time", self._shares()),
            ("speculation saved", self._saved()),
            *self.corpus,
            ("preemptions", f"{metrics.preemptions:,}"),
            ("peak memory", f"{metrics.peak_memory_bytes / 2**20:,.0f} MiB"),
            ("output", str(self.output)),
        ]  # fmt: skip

    def _beside(self) -> str:
        resumed = f", {self.resumed:,} more from before" if self.resumed else ""
        skipped = f", {self.skipped_prompts:,} prompts skipped" if self.skipped_prompts else ""
        return resumed + skipped

    def _drafts(self) -> str:
        drafted, accepted = self.metrics.drafted, self.metrics.accepted
        if not drafted:
            return "none"
        expected = self.metrics.expected_accepted
        return f"{drafted:,} / {accepted:,} ({accepted / drafted:.0%}; expected {expected:,.0f})"

    def _shares(self) -> str:
        metrics = self.metrics
        phases = {
            "forward": metrics.forward_ms,
            "draft": metrics.draft_ms,
            "sampling": metrics.sample_ms,
            "scheduling": metrics.schedule_ms,
        }
        whole = max(self.seconds * self.replicas * 1e3, 1e-9)
        rest = whole - sum(phases.values())
        shares = [f"{name} {ms / whole:.1%}" for name, ms in phases.items()]
        return ", ".join([*shares, f"writing and the rest {max(rest, 0.0) / whole:.1%}"])

    def _saved(self) -> str:
        if not self.metrics.drafted:
            return "nothing was drafted"
        if not self.metrics.forecast_steps:
            return "not measured: spec.budget=learned knows what steps cost"
        saved = self.metrics.saved_seconds / self.replicas
        error = self.metrics.saved_error_seconds / self.replicas
        if abs(saved) <= error:
            return f"no difference can be told: {saved:+.1f} s \N{PLUS-MINUS SIGN} {error:.1f}"
        speedup = (self.seconds + saved) / self.seconds if self.seconds else 1.0
        return (
            f"{saved:+.1f} s \N{PLUS-MINUS SIGN} {error:.1f} ({speedup:.2f}x), measured against "
            "plain steps between the others"
        )


class JobStatus(enum.Enum):
    """How a job ended."""

    COMPLETED = "completed"
    NOTHING_TO_DO = "nothing to do"  # the output was complete already
    STOPPED = "stopped"  # by a signal; the same job goes on where it stopped
    FOLLOWED = "followed"  # this is one of several ranks, of which rank 0 did the job


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of one job."""

    status: JobStatus
    output: Path
    summary: Summary | None = None  # None when there was nothing to do
    signal: signal.Signals | None = None  # when stopped


class SweepTable:
    """The jobs of a sweep beside each other."""

    def __init__(self) -> None:
        self._rows: list[tuple[Sequence[str], JobResult | None]] = []

    def add(self, overrides: Sequence[str], result: JobResult | None) -> None:
        """The next job: what its command line says, and its result; None where it failed."""
        self._rows.append((overrides, result))

    def print(self, console: Console) -> None:
        """A line per job, named by what is not the same in all; nothing where there is one."""
        if len(self._rows) < 2:
            return
        common = set.intersection(*(set(overrides) for overrides, _ in self._rows))
        table = Table(title="jobs of the sweep", title_justify="left")
        table.add_column("job", overflow="fold")
        for name in ("rollouts", "tokens/s", "accept length"):
            table.add_column(name, justify="right")
        table.add_column("output", overflow="fold")
        for index, (overrides, result) in enumerate(self._rows):
            own = [each for each in overrides if each not in common]
            table.add_row(" ".join(own) or str(index), *_cells(result))
        console.print(table)


def _cells(result: JobResult | None) -> tuple[str, str, str, str]:
    if result is None:
        return "failed", "", "", ""
    summary, here = result.summary, Path.cwd()
    output = result.output
    shown = str(output.relative_to(here) if output.is_relative_to(here) else output)
    if summary is None:
        return result.status.value, "", "", shown
    stopped = ", stopped" if result.status is JobStatus.STOPPED else ""
    return (
        f"{summary.rollouts + summary.resumed:,}{stopped}",
        f"{summary.tokens_per_second:,.0f}",
        f"{summary.metrics.accept_length:.3f}",
        shown,
    )
