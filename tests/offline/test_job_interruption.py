"""The dataset job when a signal, a failing engine or a failing log interrupts it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutEngine
from rollout.errors import MetricsError, OutOfMemoryError
from rollout.offline import JobStatus, LogConfig, RunConfig
from rollout.offline.run_log import JsonlLog
from rollout.types import FinishReason, Rollout
from tests.helpers.small_jobs import PARAMS, PROMPTS, output_rows, run, with_output, write_rows


def test_a_signal_stops_between_steps_and_the_job_goes_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, sampling=replace(PARAMS, n=8))
    whole = with_output(config, path=str(tmp_path / "whole.jsonl"))
    run(whole)
    stops = 0
    path = Path(config.output.path or "")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        with monkeypatch.context() as patch:
            patch.setattr(RolloutEngine, "step", signalled_step(path, number))
            result = run(config)
        if result.status is JobStatus.STOPPED:
            stops += 1
            assert result.signal is number
        assert [signal.getsignal(number) for number in numbers] == handlers
    assert stops == len(numbers)
    assert run(config).status is JobStatus.COMPLETED
    assert output_rows(config) == output_rows(whole)


def test_a_stopped_job_names_the_file_that_is_there(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(Path(config.data.path), [row for row in PROMPTS if isinstance(row["prompt"], str)])
    config = with_output(config, path=str(tmp_path / "out.parquet"))
    partial = tmp_path / "out.parquet.partial.jsonl"
    monkeypatch.setattr(RolloutEngine, "step", signalled_step(partial, signal.SIGINT))
    result = run(config)
    assert result.status is JobStatus.STOPPED
    assert result.summary is not None
    assert result.summary.output == partial
    assert len(partial.read_text().splitlines()) == result.summary.rollouts > 0
    assert str(partial) in dict(result.summary.lines())["rollouts"]


def test_a_second_signal_insists(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = with_output(config, path=str(tmp_path / "whole.jsonl"))
    run(whole)
    path = Path(config.output.path or "")
    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", signalled_step(path, signal.SIGINT, times=2))
        with pytest.raises(KeyboardInterrupt):
            run(config)
    done = len(output_rows(config))
    result = run(config)
    assert result.summary is not None
    assert result.summary.resumed == done > 0
    assert output_rows(config) == output_rows(whole)


def test_a_signal_that_is_ignored_stays_so(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nohup ignores SIGHUP, and so does the job it runs."""
    path = Path(config.output.path or "")
    monkeypatch.setattr(RolloutEngine, "step", signalled_step(path, signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(config).status is JobStatus.COMPLETED
    finally:
        signal.signal(signal.SIGHUP, before)


def signalled_step(path: Path, number: signal.Signals, times: int = 1):
    """A step in which the signal comes so many times, when the output has grown."""
    real_step, sent = RolloutEngine.step, []
    before = path.stat().st_size if path.exists() else 0

    def step(engine: RolloutEngine) -> list[Rollout]:
        if not sent and path.exists() and path.stat().st_size > before:
            sent.append(number)
            for _ in range(times):
                signal.raise_signal(number)
        return real_step(engine)

    return step


def test_an_engine_that_fails_loses_nothing_finished(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step = RolloutEngine.step
    finished: list[Rollout] = []

    def failing_step(engine: RolloutEngine) -> list[Rollout]:
        if len(finished) >= 4:
            raise OutOfMemoryError("the device is lost")
        rollouts = real_step(engine)
        finished.extend(r for r in rollouts if r.finish_reason is not FinishReason.ABORT)
        return rollouts

    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", failing_step)
        with pytest.raises(OutOfMemoryError):
            run(config)
    assert len(output_rows(config)) == len(finished) >= 4
    result = run(config)
    assert result.summary is not None
    assert result.summary.resumed == len(finished)
    assert len(output_rows(config)) == 12


def test_a_log_that_fails_loses_no_rollout(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, log=LogConfig(jsonl=str(tmp_path / "run.jsonl")))
    ended: list[Rollout] = []
    real_step, real_write = RolloutEngine.step, JsonlLog.write

    def counting_step(engine: RolloutEngine) -> list[Rollout]:
        rollouts = real_step(engine)
        ended.extend(rollouts)
        return rollouts

    def failing_write(log: JsonlLog, kind: str, values: dict[str, Any]) -> None:
        if kind == "rollout":
            raise MetricsError("the disk is full")
        real_write(log, kind, values)

    monkeypatch.setattr(RolloutEngine, "step", counting_step)
    with monkeypatch.context() as patch:
        patch.setattr(JsonlLog, "write", failing_write)
        with pytest.raises(MetricsError):
            run(config)
    assert ended
    assert len(output_rows(config)) == len(ended)
    run(config)
    assert len(output_rows(config)) == 12
