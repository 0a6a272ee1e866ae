"""The example runs as it stands; here on a tiny model instead of the demo one."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

from tests.helpers.text_model import save_text_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_grpo.py"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_text_model(tmp_path / "model")
    flags = ["--max-steps", "2", "--max-completion-length", "12", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["trl_grpo", str(model), *flags])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "reward by step: 0.00 0.00" in printed
    assert "drafted tokens accepted" in printed
