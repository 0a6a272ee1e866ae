"""The table at a sweep's end: what differs names a job, and plain decoding is what it is over."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rollout.engine.metrics import EngineMetrics
from rollout.offline import JobResult, JobStatus, SweepTable
from rollout.offline.summary import Summary


def printed(table: SweepTable) -> list[str]:
    """The lines of the table in a terminal of 80 columns, with single spaces."""
    file = StringIO()
    table.print(Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    return [" ".join(line.split()) for line in lines]


def result(status: JobStatus, path: Path, rollouts: int, seconds: float = 2.0) -> JobResult:
    metrics = EngineMetrics(generated_tokens=9000, target_forwards=6000)
    summary = Summary(output=path, rollouts=rollouts, seconds=seconds, metrics=metrics)
    return JobResult(status, path, summary)


def test_jobs_are_named_by_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = SweepTable()
    table.add(["model.path=m", "spec=none"], result(JobStatus.COMPLETED, tmp_path / "0.jsonl", 12))
    assert printed(table) == []
    table.add(["model.path=m", "spec=ngram"], result(JobStatus.STOPPED, Path("1.jsonl"), 5, 1.0))
    table.add(["model.path=m", "spec=mtp"], None)
    table.add(["model.path=m"], JobResult(JobStatus.NOTHING_TO_DO, Path("/elsewhere/3.jsonl")))
    lines = printed(table)
    assert lines[0] == "jobs of the sweep"
    for line in (
        "0 spec=none 12 2.0 4,500 1.00x 1.500",
        "1 spec=ngram 5, stopped 1.0 9,000 2.00x 1.500",
        "2 spec=mtp failed",
        "job 0: 0.jsonl",
        "job 1: 1.jsonl",
        "job 3: /elsewhere/3.jsonl",
    ):
        assert line in lines


def test_a_speedup_is_over_the_same_settings_without_drafts_and_words_stay_whole() -> None:
    table = SweepTable()
    settings = ["sampling.temperature=0.6", "spec.num_draft_tokens=16", "sampling.max_new_tokens=9"]
    cold = ["sampling.temperature=0.0", *settings[1:]]
    done = JobStatus.COMPLETED
    table.add(["spec=ngram", *settings], result(done, Path("0.jsonl"), 1_000_000, 400.0))
    table.add(["spec=none", settings[0], settings[2]], result(done, Path("1.jsonl"), 12, 800.0))
    table.add(["spec=hybrid", *cold], result(done, Path("2.jsonl"), 12, 100.0))
    lines = printed(table)
    assert "0 spec=ngram 1,000,000 400.0 22 2.00x 1.500" in lines
    assert "2 spec=hybrid 12 100.0 90 1.500" in lines  # its temperature was not decoded plainly
    assert {"temperature=0.0", "num_draft_tokens=16"} <= set(lines)
    assert any("seconds tokens/s speedup" in line for line in lines)


def test_brackets_are_shown_as_they_are() -> None:
    table = SweepTable()
    folder = Path("/runs/[x]")
    table.add(["sampling.stop=[foo]"], result(JobStatus.COMPLETED, folder / "a[/b].jsonl", 1))
    table.add(["sampling.stop=[bar]"], result(JobStatus.COMPLETED, folder / "c.jsonl", 1))
    lines = printed(table)
    assert "0 stop=[foo] 1 2.0 4,500 1.500" in lines
    assert "job 0: /runs/[x]/a[/b].jsonl" in lines
    file = StringIO()
    Summary(output=folder / "a[/b].jsonl").print(Console(file=file, width=80))
    assert "/runs/[x]/a[/b].jsonl" in file.getvalue()
