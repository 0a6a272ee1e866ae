"""A job never writes a file that it reads, whatever names the files are given by."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout import SamplingParams
from rollout.errors import InvalidInputError
from rollout.offline import DataConfig, JobStatus, LogConfig, OutputError, RunConfig
from rollout.offline.output import output_lock
from tests.helpers.small_jobs import output_rows, run, small_job, with_output, write_rows

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=3, seed=5)
ROWS = [{"prompt": [5, 6, 7]}, {"prompt": [8]}]


@pytest.fixture
def config(text_model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small_job(text_model_path, tmp_path, ROWS, PARAMS)
    return with_output(config, overwrite=True)


def with_files(
    config: RunConfig, data: str = "", output: str = "", spec: Any = None, **log: str
) -> RunConfig:
    config = replace(config, spec=spec or config.spec, log=LogConfig(**log))
    if data:
        config = replace(config, data=DataConfig(path=data))
    return with_output(config, path=output) if output else config


def content(folder: Path) -> dict[str, bytes | str]:
    files = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {str(path): os.readlink(path) if path.is_symlink() else path.read_bytes()
            for path in files}  # fmt: skip


def refused(config: RunConfig, message: str, folder: Path) -> None:
    """The job raises before it changes a file, however much it may overwrite."""
    before = content(folder)
    with pytest.raises(InvalidInputError, match=message):
        run(config)
    assert content(folder) == before


def test_no_file_is_written_that_is_read(config, tmp_path, text_model_path):
    for folder in ("sub", "draft", "folder.jsonl"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    reserved = ("q.parquet.partial.jsonl", "q.jsonl.corpus.saving.jsonl",
                "q.jsonl.corpus.learned.json.saving.a.jsonl")  # fmt: skip
    for name in ("q.jsonl", "draft/config.json", *reserved):
        write_rows(tmp_path / name, ROWS)
    Path("symbolic.jsonl").symlink_to("q.jsonl")
    Path("link.jsonl").symlink_to(tmp_path / "target.parquet")
    Path("out.jsonl").symlink_to("rollouts.jsonl")
    Path("l.parquet.run.json").symlink_to("prompts.jsonl")
    os.mkfifo("pipe.jsonl")  # opening it would wait for a reader
    for data, output in (
        (reserved[0], "q.parquet"),
        (reserved[0], "sub/../q.parquet"),
        (reserved[0], "link/q.parquet"),
        (reserved[1], "q.jsonl"),
        (reserved[2], "q.jsonl"),
        ("q.jsonl", "q.jsonl"),
        ("q.jsonl", "symbolic.jsonl"),
        ("symbolic.jsonl", "q.jsonl"),
    ):
        refused(with_files(config, data, output), r"data\.path", tmp_path)
    link = with_files(config, output="l.parquet")
    refused(link, r"l\.parquet\.run\.json too, which is data\.path", tmp_path)
    for field, spec in (
        ("external_corpora", {"external_corpora": {"a": "other.txt", "code": "q.jsonl"}}),
        ("external_corpora", {"external_corpora": {"code": "q.jsonl.run.json"}}),
        ("corpus_path", {"corpus_path": "q.jsonl.corpus.learned.json"}),
        ("corpus_path", {"corpus_path": "q.jsonl"}),
    ):
        refused(with_files(config, output="q.jsonl", spec=spec), rf"is spec\.{field}", tmp_path)
    learned = with_files(config, spec={"corpus_path": "q"}, jsonl="q.learned.json")
    refused(learned, r"^log\.jsonl=.* is spec\.corpus_path", tmp_path)
    draft = with_files(config, spec={"draft_path": "draft"}, jsonl="draft/config.json")
    refused(draft, r"is read from spec\.draft_path", tmp_path)
    for name in ("rollouts.jsonl", "out.jsonl", "prompts.jsonl", "rollouts.jsonl.run.json",
                 "rollouts.jsonl.corpus", "rollouts.jsonl.lock"):  # fmt: skip
        refused(with_files(config, jsonl=name), r"^log\.jsonl=", tmp_path)
    for field, given, kind in (
        ("output.path", with_files(config, output="folder.jsonl"), "a file"),
        ("output.path", with_files(config, output="pipe.jsonl"), "a file"),
        ("log.jsonl", with_files(config, jsonl="folder.jsonl"), "a file"),
    ):
        refused(given, rf"^{field}=.* must name {kind}", tmp_path)
    other = with_files(config, output="link.jsonl")
    refused(other, "is a link to .*target.parquet: must end as that does", tmp_path)


def test_no_file_of_the_model_is_written(config, tmp_path, text_model_path):
    """An output may stand beside the model's files, and be there when the job goes on."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in text_model_path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = replace(config, model=replace(config.model, path=str(folder)))
    for name in ("config.json", "model.safetensors"):
        log = with_files(config, jsonl=str(folder / name))
        refused(log, r"is read from model\.path", tmp_path)
    config = with_files(config, output=str(folder / "q.jsonl"), jsonl=str(folder / "log.jsonl"))
    config = with_output(config, overwrite=False)
    assert [run(config).status for _ in range(2)] == [JobStatus.COMPLETED, JobStatus.NOTHING_TO_DO]


def test_a_link_to_the_output_is_followed(config, tmp_path):
    link, target = tmp_path / "link.jsonl", tmp_path / "store" / "target.jsonl"
    link.symlink_to(target)
    by_link = with_output(config, path=str(link), overwrite=False)
    assert run(by_link).output == target
    assert os.readlink(link) == str(target)
    assert run(with_output(by_link, path=str(target))).status is JobStatus.NOTHING_TO_DO
    assert len(output_rows(by_link)) == 2
    files = ["target.jsonl", "target.jsonl.log", "target.jsonl.run.json"]
    assert sorted(os.listdir(target.parent)) == files
    with output_lock(target), pytest.raises(OutputError, match="by another job"):
        run(by_link)


def test_what_nobody_says_a_job_wrote_is_left_alone(config, tmp_path):
    config = with_output(config, path=str(tmp_path / "q.parquet"), overwrite=False)
    journal = tmp_path / "q.parquet.partial.jsonl"
    journal.write_text("precious\n")
    with pytest.raises(OutputError, match=r"partial\.jsonl exists and no q\.parquet\.run\.json"):
        run(config)
    assert journal.read_text() == "precious\n"
    run(with_output(config, overwrite=True))
    assert len(output_rows(config)) == 2
    Path("rollouts.jsonl.lock").symlink_to("q.parquet")
    before = Path("q.parquet").read_bytes()
    with pytest.raises(OutputError, match=r"jsonl.lock cannot be written"):
        run(with_output(config, path="rollouts.jsonl"))
    assert Path("q.parquet").read_bytes() == before
