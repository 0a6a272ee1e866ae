"""Outputs that the dataset job resumes, leaves alone or refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout.config import SchedulerConfig
from rollout.offline import JobStatus, OutputError, RunConfig
from tests.helpers.small_jobs import PARAMS, PROMPTS, output_rows, run, with_output, write_rows
from tests.helpers.text_model import save_text_model


def test_a_complete_output_is_left_alone(config: RunConfig) -> None:
    run(config)
    path = Path(config.output.path or "")
    before = path.read_bytes(), path.stat().st_mtime_ns
    result = run(replace(config, model=replace(config.model)), spec="ngram")
    assert result.status is JobStatus.NOTHING_TO_DO
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_whatever_is_cut_off_is_made_again(config: RunConfig, suffix: str) -> None:
    same_type = [row for row in PROMPTS if isinstance(row["prompt"], str)]
    write_rows(Path(config.data.path), same_type)
    path = Path(config.output.path or "").with_suffix(suffix)
    config = with_output(config, path=str(path))
    run(config)
    expected = output_rows(config)
    record = path.with_name(path.name + ".run.json")
    unfinished = record.read_text().replace('"complete": {', '"complete": null, "was": {')
    journal = path
    if suffix == ".parquet":
        journal = path.with_name(path.name + ".partial.jsonl")
        lines = [
            {name: value for name, value in row.items() if name not in ("prompt", "answer")}
            for row in expected
        ]
        write_rows(journal, lines)
    content = journal.read_bytes()
    for cut in (0, len(content) // 3, len(content) - 1, len(content)):
        record.write_text(unfinished)
        journal.write_bytes(content[:cut])
        result = run(config)
        assert result.status is JobStatus.COMPLETED
        assert result.summary is not None
        assert result.summary.resumed == content[:cut].count(b"\n")
        assert result.summary.rollouts + result.summary.resumed == len(expected)
        assert output_rows(config) == expected
        if suffix == ".parquet":
            assert not journal.exists()


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"sampling": replace(PARAMS, temperature=0.5)}, "sampling.temperature was 0.9 and is 0.5"),
        ({"sampling": replace(PARAMS, seed=6)}, "sampling.seed was 5 and is 6"),
        ({"exact": False}, "exact was True and is False"),
    ],
)
def test_the_output_of_another_run_is_refused(
    config: RunConfig, changes: dict[str, Any], difference: str
) -> None:
    run(config)
    other = replace(config, **changes)
    with pytest.raises(OutputError, match=rf"another run: {difference}(; .*)?\. choose another"):
        run(other)
    assert run(with_output(other, overwrite=True)).status is JobStatus.COMPLETED


def test_inexact_runs_are_told_apart_by_the_batches_they_have_not_by_how_that_was_said(
    config: RunConfig,
) -> None:
    config = replace(config, exact=False, scheduler=SchedulerConfig())
    run(config)
    said = SchedulerConfig(max_running=32, max_step_tokens=512, chunk_len=256)
    assert run(replace(config, scheduler=said)).status is JobStatus.NOTHING_TO_DO
    with pytest.raises(OutputError, match=r"scheduler was .*'max_running': 32"):
        run(replace(config, scheduler=SchedulerConfig(max_running=31)))


def test_changed_prompts_or_weights_are_noticed(config: RunConfig, tmp_path: Path) -> None:
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


def test_a_file_of_someone_else_is_refused(config: RunConfig) -> None:
    path = Path(config.output.path or "")
    path.write_text("precious\n")
    with pytest.raises(OutputError, match=r"no rollouts.jsonl.run.json says that a job wrote it"):
        run(config)
    assert path.read_text() == "precious\n"
    run(with_output(config, overwrite=True))
    assert len(output_rows(config)) == 12


def test_an_unfinished_output_of_this_run_survives_overwrite(config: RunConfig) -> None:
    config = with_output(config, overwrite=True)
    run(config)
    path = Path(config.output.path or "")
    record = path.with_name(path.name + ".run.json")
    record.write_text(record.read_text().replace('"complete": {', '"complete": null, "was": {'))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    result = run(config)
    assert result.summary is not None
    assert (result.summary.resumed, result.summary.rollouts) == (5, 7)
    again = run(config)  # complete now: made anew
    assert again.summary is not None
    assert (again.summary.resumed, again.summary.rollouts) == (0, 12)
