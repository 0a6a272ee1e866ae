"""The benchmark of neural drafts, on a tiny model: which rows there are, and what is held out."""

from __future__ import annotations

import json
from pathlib import Path

import bench_eagle
import pytest
from bench_eagle import (
    DRAFTING,
    HYBRID,
    HYBRID_MTP,
    MTP,
    NGRAM,
    Folders,
    Setting,
    accept_length_rows,
    epoch_rows,
    speed_rows,
)
from harness.prompts import held_out_prompts

from rollout import SamplingParams
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_mtp import save_tiny_mtp

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    target, chain = save_tiny_mtp(folder, "separate")
    return Folders(model=target, eagle3=save_tiny_eagle3(folder / "eagle3", target), mtp=chain)


def test_accept_lengths_of_every_kind_at_every_temperature(folders):
    rows = list(accept_length_rows(folders, PROMPTS, max_tokens=6))
    settings = ("greedy", "T 0.7", "T 1.0")
    assert [row.name for row in rows] == [
        f"accept length, {setting}: {entrant}" for entrant in DRAFTING for setting in settings
    ]
    assert all(row.value >= 1 for row in rows)
    assert {row.name: row.bar for row in rows if row.bar is not None} == {
        "accept length, greedy: eagle3": 2.2,
        "accept length, T 0.7: eagle3": 1.8,
    }


def test_hybrids_are_held_against_their_parts(folders):
    rows = {row.name: row for row in epoch_rows(folders, PROMPTS, 8)}
    lengths = {name.rpartition(": ")[2]: row.value for name, row in rows.items()}
    for hybrid, neural in ((HYBRID, "eagle3"), (HYBRID_MTP, MTP)):
        (row,) = (row for name, row in rows.items() if f"{hybrid} to the better" in name)
        better = max(lengths[NGRAM], lengths[neural])
        assert row.value == pytest.approx(lengths[hybrid] / better, abs=1e-3)
        assert row.bar == 1.05


def test_speeds_are_those_of_every_kind_beside_plain_decoding(folders):
    params = SamplingParams(temperature=0.7, max_new_tokens=6)
    setting = Setting(name="warm", params=params, batch=1, hybrid_bar=1.7)
    rows = {row.name: row for row in speed_rows(folders, setting, PROMPTS, repeats=2)}
    assert list(rows) == [
        f"warm, {what}: {name}" for name in DRAFTING for what in ("speedup", "at least", "drafting")
    ]
    for name in DRAFTING:
        assert rows[f"warm, speedup: {name}"].bar == (1.7 if name == HYBRID else 0.97)
        assert 0 < rows[f"warm, drafting: {name}"].value < 1


def test_a_draft_can_be_left_out(folders):
    alone = Folders(model=folders.model, eagle3=None, mtp=folders.mtp)
    assert alone.drafting == (MTP, NGRAM, HYBRID_MTP)


def test_what_is_missing_is_said_with_what_makes_it(folders, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--draft .*make demo-draft"):
        bench_eagle.draft_folder("--draft", str(tmp_path), "make demo-draft")
    assert bench_eagle.draft_folder("--draft", str(folders.mtp), "") == folders.mtp
    assert bench_eagle.draft_folder("--draft", "none", "") is None
    with pytest.raises(FileNotFoundError, match="make runs"):
        held_out_prompts(tmp_path / "prompts.jsonl", 3)


def test_tasks_take_turns_among_the_held_out(tmp_path):
    path = Path(tmp_path) / "prompts.jsonl"
    tasks = ["sums", "sums", "sums", "open", "tales", "tales"]
    rows = [
        {"task": task, "messages": f"{task} {k}", "answer": "4" if task == "sums" else None}
        for k, task in enumerate(tasks)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert held_out_prompts(path, 5) == ["sums 0", "open 3", "tales 4", "sums 1", "tales 5"]
    assert len(held_out_prompts(path, 100)) == 6
    assert held_out_prompts(path, 2, with_answers=True) == ["sums 0", "sums 1"]
