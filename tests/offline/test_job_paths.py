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
def config(text_model_path: Path, tmp_path: Path) -> RunConfig:
    return small_job(text_model_path, tmp_path, ROWS, PARAMS)


def with_data(config: RunConfig, path: Path) -> RunConfig:
    return replace(config, data=DataConfig(path=str(path)))


def content(folder: Path) -> dict[str, bytes | str]:
    files = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {str(path): os.readlink(path) if path.is_symlink() else path.read_bytes()
            for path in files}  # fmt: skip


def refused(config: RunConfig, message: str, folder: Path) -> None:
    """The job raises before it changes a file, however much it may overwrite."""
    before = content(folder)
    with pytest.raises(InvalidInputError, match=message):
        run(with_output(config, overwrite=True))
    assert content(folder) == before


@pytest.mark.parametrize(
    ("data", "output"),
    [
        ("q.parquet.partial.jsonl", "q.parquet"),
        ("q.parquet.partial.jsonl", "sub/../q.parquet"),
        ("q.parquet.partial.jsonl", "link/q.parquet"),
        ("q.jsonl.corpus.saving.jsonl", "q.jsonl"),
        ("q.jsonl.corpus.learned.json.saving.a.jsonl", "q.jsonl"),
        ("q.jsonl", "q.jsonl"),
        ("q.jsonl", "link/q.jsonl"),
        ("q.jsonl", "symbolic.jsonl"),
        ("q.jsonl", "hard.jsonl"),
        ("symbolic.jsonl", "q.jsonl"),
        ("symbolic.jsonl", "hard.jsonl"),
    ],
)
def test_the_prompts_are_never_written(
    config: RunConfig, tmp_path: Path, data: str, output: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    write_rows(tmp_path / "q.jsonl", ROWS)
    (tmp_path / "symbolic.jsonl").symlink_to("q.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "q.jsonl")
    write_rows(tmp_path / data, ROWS)
    config = with_output(with_data(config, tmp_path / data), path=str(tmp_path / output))
    refused(config, r"data\.path", tmp_path)


@pytest.mark.parametrize("suffix", [".partial.jsonl", ".run.json", ".tmp", ".lock", ".corpus"])
def test_a_link_in_the_place_of_a_file_beside_the_output(
    config: RunConfig, tmp_path: Path, suffix: str
) -> None:
    config = with_output(config, path=str(tmp_path / "q.parquet"))
    (tmp_path / f"q.parquet{suffix}").symlink_to(config.data.path)
    refused(config, rf"q\.parquet{suffix} too, which is data\.path", tmp_path)


@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ({"external_corpora": {"code": "q.jsonl"}}, "q.jsonl"),
        ({"external_corpora": {"code": "q.jsonl.run.json"}}, "q.jsonl.run.json"),
        ({"corpus_path": "q.jsonl.corpus.learned.json"}, "q.jsonl.corpus.learned.json"),
        ({"corpus_path": "q.jsonl"}, "q.jsonl"),
        ({"draft_path": "draft"}, "draft/config.json"),
    ],
)
def test_what_drafts_are_made_from_is_never_written(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, Any],
    file: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    Path(file).write_text("precious")
    log = LogConfig(jsonl=file if "draft_path" in spec else None)
    config = replace(with_output(config, path="q.jsonl"), spec=spec, log=log)
    refused(config, rf"is (read from )?spec\.{next(iter(spec))}", tmp_path)


def test_no_file_of_the_model_is_written(
    config: RunConfig, tmp_path: Path, text_model_path: Path
) -> None:
    """An output may stand beside the model's files, and be there when the job goes on."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in text_model_path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = replace(config, model=replace(config.model, path=str(folder)))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        log = LogConfig(jsonl=str(folder / name))
        refused(replace(config, log=log), r"is read from model\.path", tmp_path)
    config = with_output(config, path=str(folder / "q.jsonl"))
    config = replace(config, log=LogConfig(jsonl=str(folder / "log.jsonl")))
    assert [run(config).status for _ in range(2)] == [
        JobStatus.COMPLETED,
        JobStatus.NOTHING_TO_DO,
    ]


@pytest.mark.parametrize(
    "name",
    [
        "rollouts.jsonl",
        "other.jsonl",
        "prompts.jsonl",
        "rollouts.jsonl.run.json",
        "rollouts.jsonl.corpus",
        "rollouts.jsonl.lock",
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_the_log_has_a_file_of_its_own(
    config: RunConfig, tmp_path: Path, kind: str, name: str
) -> None:
    (tmp_path / "other.jsonl").symlink_to("rollouts.jsonl")
    log = LogConfig(**{kind: str(tmp_path / name)})
    refused(replace(config, log=log), rf"^log\.{kind}=", tmp_path)


def test_folders_in_the_place_of_files(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    folder = str(tmp_path / "folder.jsonl")
    refused(with_output(config, path=folder), r"^output\.path=.* must name a file", tmp_path)
    log = LogConfig(jsonl=folder)
    refused(replace(config, log=log), r"^log\.jsonl=.* must name a file", tmp_path)
    log = LogConfig(tensorboard=config.data.path)
    refused(replace(config, log=log), r"^log\.tensorboard=.* must name a folder", tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")  # opening it would wait for a reader
    refused(with_output(config, path=str(tmp_path / "pipe.jsonl")), "must name a file", tmp_path)


def test_a_link_to_the_output_is_followed(config: RunConfig, tmp_path: Path) -> None:
    link, target = tmp_path / "link.jsonl", tmp_path / "store" / "target.jsonl"
    link.symlink_to(target)
    by_link = with_output(config, path=str(link))
    by_name = with_output(config, path=str(target))
    assert run(by_link).output == target
    assert os.readlink(link) == str(target)
    assert run(by_name).status is JobStatus.NOTHING_TO_DO
    assert len(output_rows(by_link)) == 2
    assert sorted(path.name for path in target.parent.iterdir()) == [
        "target.jsonl",
        "target.jsonl.run.json",
    ]
    with output_lock(target), pytest.raises(OutputError, match="by another job"):
        run(by_link)
    link.unlink()
    link.symlink_to(tmp_path / "target.parquet")
    refused(by_link, "is a link to .*target.parquet: must end as that does", tmp_path)


def test_a_link_in_the_lock_s_place_is_not_written_through(
    config: RunConfig, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    Path(f"{config.output.path}.lock").symlink_to(precious)
    with pytest.raises(OutputError, match=r"jsonl.lock cannot be written"):
        run(config)
    assert precious.read_text() == "precious"


def test_rollouts_without_their_record_are_not_removed(config: RunConfig, tmp_path: Path) -> None:
    config = with_output(config, path=str(tmp_path / "q.parquet"))
    journal = tmp_path / "q.parquet.partial.jsonl"
    journal.write_text("precious\n")
    with pytest.raises(OutputError, match=r"partial\.jsonl exists and no q\.parquet\.run\.json"):
        run(config)
    assert journal.read_text() == "precious\n"
    run(with_output(config, overwrite=True))
    assert len(output_rows(config)) == 2
