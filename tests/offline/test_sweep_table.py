"""The table at a sweep's end: what differs names a job."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from rollout.engine.metrics import EngineMetrics
from rollout.offline import JobResult, JobStatus, SweepTable
from rollout.offline.summary import Summary


def printed(table: SweepTable) -> str:
    file = StringIO()
    table.print(Console(file=file, width=140))
    return file.getvalue()


def result(status: JobStatus, path: Path, rollouts: int) -> JobResult:
    metrics = EngineMetrics(generated_tokens=9000)
    summary = Summary(output=path, rollouts=rollouts, seconds=2.0, metrics=metrics)
    return JobResult(status, path, summary)


def test_jobs_are_named_by_what_differs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = SweepTable()
    table.add(["model.path=m", "spec=none"], result(JobStatus.COMPLETED, tmp_path / "0.jsonl", 12))
    assert printed(table) == ""
    table.add(["model.path=m", "spec=ngram"], result(JobStatus.STOPPED, Path("1.jsonl"), 5))
    table.add(["model.path=m", "spec=mtp"], None)
    table.add(["model.path=m"], JobResult(JobStatus.NOTHING_TO_DO, Path("/elsewhere/3.jsonl")))
    lines = [" ".join(line.replace("\u2502", "").split()) for line in printed(table).splitlines()]
    assert lines[0] == "jobs of the sweep"
    assert [line for line in lines if "spec=" in line or "elsewhere" in line] == [
        "spec=none 12 4,500 0.000 0.jsonl",
        "spec=ngram 5, stopped 4,500 0.000 1.jsonl",
        "spec=mtp failed",
        "3 nothing to do /elsewhere/3.jsonl",
    ]
