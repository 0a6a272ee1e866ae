"""The examples run as they stand; here on a tiny model instead of the demo one."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.text_model import save_text_model

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("generate", "--- prompt 1, sample 1:"),
        ("stream", "drafts accepted"),
        ("update_weights", "weight version 1: "),
        ("external_corpus", "answers: published, "),
    ],
)
def test_an_example_runs(
    name: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(save_text_model(tmp_path / "model"))])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert shown in capsys.readouterr().out
