"""Jobs that are interrupted, and outputs that a job resumes, leaves alone or refuses."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutEngine
from rollout.config import SchedulerConfig
from rollout.errors import OutOfMemoryError
from rollout.offline import JobStatus, OutputError
from rollout.types import FinishReason, Rollout
from tests.helpers.small_jobs import PARAMS, PROMPTS, output_rows, run, with_output, write_rows
from tests.helpers.text_model import save_text_model


def test_a_signal_stops_between_steps_and_the_job_goes_on(config, tmp_path, monkeypatch):
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


def test_a_second_signal_insists(config, tmp_path, monkeypatch):
    path = Path(config.output.path or "")
    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", signalled_step(path, signal.SIGINT, times=2))
        with pytest.raises(KeyboardInterrupt):
            run(config)
    done = len(output_rows(config))
    result = run(config)
    assert result.summary.resumed == done > 0
    assert len(output_rows(config)) == 12


def test_a_signal_that_is_ignored_stays_so(config, monkeypatch):
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


def test_an_engine_that_fails_loses_no_finished_rollout(config, monkeypatch):
    finished: list[Rollout] = []
    real_step = RolloutEngine.step

    def step(engine):
        if len(finished) >= 4:
            raise OutOfMemoryError("the device is lost")
        rollouts = real_step(engine)
        finished.extend(r for r in rollouts if r.finish_reason is not FinishReason.ABORT)
        return rollouts

    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "step", step)
        with pytest.raises(OutOfMemoryError):
            run(config)
    assert len(output_rows(config)) == len(finished) > 0
    result = run(config)
    assert result.summary.resumed == len(finished)
    assert len(output_rows(config)) == 12


def unfinished_record(output: Path) -> tuple[Path, str]:
    """The record's file, and its text while the output was not complete."""
    record = output.with_name(output.name + ".run.json")
    return record, record.read_text().replace('"complete": {', '"complete": null, "was": {')


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_whatever_is_cut_off_is_made_again(config, suffix):
    same_type = [row for row in PROMPTS if isinstance(row["prompt"], str)]
    write_rows(Path(config.data.path), same_type)
    path = Path(config.output.path or "").with_suffix(suffix)
    config = with_output(config, path=str(path))
    run(config)
    expected = output_rows(config)
    record, unfinished = unfinished_record(path)
    journal = path
    if suffix == ".parquet":
        journal = path.with_name(path.name + ".partial.jsonl")
        lines = [
            {name: value for name, value in row.items() if name not in ("prompt", "answer")}
            | {"seed": row["seed"] % 2**64}  # as outputs may have it
            for row in expected
        ]
        write_rows(journal, lines)
    content = journal.read_bytes()
    for cut in (0, len(content) // 3, len(content) - 1, len(content)):
        record.write_text(unfinished)
        journal.write_bytes(content[:cut])
        result = run(config)
        assert result.status is JobStatus.COMPLETED
        assert result.summary.resumed == content[:cut].count(b"\n")
        assert result.summary.rollouts + result.summary.resumed == len(expected)
        assert output_rows(config) == expected
        if suffix == ".parquet":
            assert not journal.exists()
    before = path.read_bytes(), path.stat().st_mtime_ns
    if suffix == ".parquet":
        journal.write_bytes(content)  # killed just before it was removed
        assert run(config).status is JobStatus.NOTHING_TO_DO
        assert not journal.exists()
    assert run(config, spec="ngram").status is JobStatus.NOTHING_TO_DO
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


CHANGES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"sampling": replace(PARAMS, temperature=0.5)}, "sampling.temperature was 0.9 and is 0.5"),
    ({"exact": False}, "exact was True and is False"),
)


def test_the_output_of_another_run_is_refused(config):
    run(config)
    for changes, difference in CHANGES:
        other = replace(config, **changes)
        said = rf"another run: {difference}(; .*)?\. choose another"
        with pytest.raises(OutputError, match=said):
            run(other)
    assert run(with_output(other, overwrite=True)).status is JobStatus.COMPLETED


def test_inexact_runs_are_told_apart_by_the_batches_they_have_not_by_how_that_was_said(config):
    config = replace(config, exact=False, scheduler=SchedulerConfig())
    run(config)
    said = SchedulerConfig(max_running=32, max_step_tokens=512, chunk_len=256)
    assert run(replace(config, scheduler=said)).status is JobStatus.NOTHING_TO_DO
    with pytest.raises(OutputError, match=r"scheduler was .*'max_running': 32"):
        run(replace(config, scheduler=SchedulerConfig(max_running=31)))


def test_changed_prompts_or_weights_are_noticed(config, tmp_path):
    run(config)
    write_rows(Path(config.data.path), [*PROMPTS, {"prompt": "one"}])
    with pytest.raises(OutputError, match=r"data \(the prompts themselves\) differs"):
        run(config)
    write_rows(Path(config.data.path), PROMPTS)
    other = save_text_model(tmp_path / "other-model")
    moved = replace(config, model=replace(config.model, path=str(other)))
    assert run(moved).status is JobStatus.NOTHING_TO_DO  # the same model, elsewhere
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(OutputError, match="model weights differs"):
        run(moved)


def test_an_unfinished_output_of_this_run_survives_overwrite(config):
    config = with_output(config, overwrite=True)
    run(config)
    path = Path(config.output.path or "")
    record, unfinished = unfinished_record(path)
    record.write_text(unfinished)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    result = run(config)
    assert (result.summary.resumed, result.summary.rollouts) == (5, 7)
    again = run(config)  # complete now: made anew
    assert (again.summary.resumed, again.summary.rollouts) == (0, 12)
