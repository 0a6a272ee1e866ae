"""Models, tokenizers and drafts by their names on the Hugging Face hub."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rollout import RolloutEngine
from rollout.config import ModelConfig
from rollout.errors import InvalidInputError
from rollout.hub import hub_name, model_folder
from rollout.offline import JobStatus
from tests.helpers.forked import forked
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.loopback_hub import cached_snapshot, loopback_hub
from tests.helpers.small_jobs import PARAMS, PROMPTS, output_rows, run, small_job
from tests.helpers.tiny_draft import save_tiny_eagle3


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache of huggingface_hub, which is offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_name_is_its_snapshot_unless_there_is_such_a_folder(
    cache, text_model_path, tmp_path, monkeypatch
):
    snapshot = cached_snapshot(cache, "someone/tiny", text_model_path)
    for name in ("someone/tiny", "someone/tiny@main", f"someone/tiny@{snapshot.name}"):
        assert model_folder(name, "model.path") == str(snapshot)
    assert hub_name(str(snapshot)) == f"someone/tiny@{snapshot.name}"
    assert hub_name(str(text_model_path)) is None
    monkeypatch.chdir(tmp_path)
    Path("someone/tiny").mkdir(parents=True)
    for path in ("someone/tiny", "./someone/tiny", "tiny", "/no/tiny", "a/b/c", "nowhere/"):
        assert model_folder(path, "model.path") == path


def test_what_the_cache_lacks_is_refused_offline(cache, text_model_path):
    cached_snapshot(cache, "someone/tiny", text_model_path)
    for name in ("someone/other", "someone/tiny@v2", "someone/ti--ny"):
        with pytest.raises(InvalidInputError, match="cannot be had from the hub") as refused:
            ModelConfig(path=name)
        assert (refused.value.field, refused.value.value) == ("model.path", name)
    with pytest.raises(InvalidInputError, match=r"model.tokenizer='someone/other': is no folder"):
        ModelConfig(path="someone/tiny", tokenizer="someone/other")


def test_an_engine_takes_names_of_model_tokenizer_and_draft(cache, text_model_path, tmp_path):
    draft = save_tiny_eagle3(tmp_path / "draft", text_model_path)
    for name, folder in (("tiny", text_model_path), ("draft", draft)):
        cached_snapshot(cache, f"someone/{name}", folder)
    engine = RolloutEngine.from_pretrained(
        "someone/tiny",
        "eagle",
        spec_options={"draft_path": "someone/draft", "calibration_seconds": 0},
        tokenizer="someone/tiny",
        max_kv_tokens=64,
    )
    assert engine.generate(["one two"], PARAMS)[0].text
    engine.close()
    with pytest.raises(InvalidInputError, match=r"spec.draft_path='someone/none': is no folder"):
        RolloutEngine.from_pretrained(
            "someone/tiny", "eagle", spec_options={"draft_path": "someone/none"}
        )


def test_a_job_goes_on_wherever_its_model_is(cache, text_model_path, tmp_path):
    cached_snapshot(cache, "someone/tiny", text_model_path)
    of_folder = small_job(text_model_path, tmp_path, PROMPTS, PARAMS)
    of_folder = replace(of_folder, log=replace(of_folder.log, jsonl=str(tmp_path / "log")))
    assert run(of_folder).status is JobStatus.COMPLETED
    rows = output_rows(of_folder)
    by_name = replace(of_folder, model=replace(of_folder.model, path="someone/tiny"))
    assert run(by_name).status is JobStatus.NOTHING_TO_DO
    anew = replace(by_name, output=replace(by_name.output, overwrite=True))
    assert run(anew).status is JobStatus.COMPLETED
    assert output_rows(anew) == rows
    runs = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    names = [line["model"] for line in runs if line["kind"] == "run"]
    assert names == [str(text_model_path), hub_name(by_name.model.path)]


def test_what_is_needed_is_downloaded_once(text_model_path, tmp_path):
    """By two processes at the same time, from a hub on this machine."""
    model = shutil.copytree(text_model_path, tmp_path / "hub" / "someone" / "tiny")
    files = sorted(f"someone/tiny/{file.name}" for file in model.iterdir())
    (model / "original").mkdir()
    for unread in ("pytorch_model.bin", "original/params.json", "consolidated.safetensors"):
        (model / unread).write_text("not read")
    with loopback_hub(tmp_path / "hub") as hub:
        children = [
            forked(model_folder, "someone/tiny@main", "path", environment=hub.environment(tmp_path))
            for _ in range(2)
        ]
        for child in children:
            child.join(HANG_SECONDS)
    assert [child.exitcode for child in children] == [0, 0]
    assert sorted(hub.downloads) == files
