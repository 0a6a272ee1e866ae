"""`specrollout compare` on a tiny model: rows, advice, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.errors import InvalidInputError
from rollout.offline.compare.command import run_compare
from rollout.offline.compare.comparison import Comparison
from tests.helpers.tiny_draft import save_tiny_eagle3

SMALL = (
    "sampling.max_new_tokens=12",
    "sampling.n=2",
    "scheduler.max_running=4",
    "memory.max_kv_tokens=512",
    "num_threads=1",
)


@pytest.fixture
def arguments(tmp_path: Path, tiny_model_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [5 + index, 6, 7]} for index in range(6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"model.path={tiny_model_path}", f"data.path={prompts}", *SMALL]


def test_every_kind_temperature_and_width_has_a_row(
    arguments: list[str],
    tmp_path: Path,
    tiny_model_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    draft = save_tiny_eagle3(tmp_path / "draft", tiny_model_path)
    code = run_compare(
        [
            "spec=ngram,eagle",
            f"spec.draft_path={draft}",
            "spec.calibration_seconds=0",
            *arguments,
            "--widths=1,4",
            "--temperatures=0,0.8",
            f"--json={tmp_path / 'rows.jsonl'}",
        ]
    )
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["spec"], row["temperature"], row["width"]) for row in rows] == [
        (kind, temperature, width)
        for kind in ("ngram", "eagle")
        for temperature in (0, 0.8)
        for width in (1, 4)
    ]
    assert [row["pairs"] for row in rows] == [12, 3] * 4
    assert all(row["rollouts"] == 12 and row["differing"] == 0 for row in rows)
    assert all(row["low"] <= row["speedup"] <= row["high"] for row in rows if row["pairs"] == 12)
    assert "same tokens and logprobs: 12 of 12" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "rows.jsonl", "draft"}


def test_rollouts_that_differ_are_said_and_fail(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Comparison._decode

    def wrong(self, work, stretch, engines):
        made = decode(self, work, stretch, engines)
        if False in made and (3, 1) in made[False].rollouts:
            made[False].rollouts[3, 1].logprobs[-1] += 1e-6
        return made

    monkeypatch.setattr(Comparison, "_decode", wrong)
    assert run_compare([*arguments, "--widths=12"]) == 1
    assert "1 of 12 rollouts differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["spec=none"], "what the others are compared with"),
        (["spec=ngarm"], "hybrid"),
        (["spec.num_draft_token=3"], r"spec\.num_draft_token=3"),
        (["cluster=ray"], "one engine"),
        (["--widths=0"], "--widths"),
        (["--widths=4,x"], "--widths"),
        (["--minutes=0"], "--minutes"),
        (["--epochs=0"], "--epochs"),
        (["data.path=missing.jsonl"], "there is no such file"),
    ],
)
def test_refusals_name_the_argument(arguments: list[str], more: list[str], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        run_compare([*arguments, *more])


def test_nothing_that_is_read_is_replaced(arguments: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    before = prompts.read_bytes()
    link = tmp_path / "rows.jsonl"
    link.symlink_to(prompts)
    for path in (prompts, link):
        with pytest.raises(InvalidInputError, match=r"--json=.*is data\.path"):
            run_compare([*arguments, f"--json={path}"])
    for path in (tmp_path, tmp_path / "missing" / "rows.jsonl"):
        with pytest.raises(InvalidInputError, match=r"--json=.*must name a file"):
            run_compare([*arguments, f"--json={path}"])
    assert prompts.read_bytes() == before
