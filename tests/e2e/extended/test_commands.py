"""A reader of the output that leaves; ranks that fail; the examples on a tiny model."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hang import HANG_SECONDS
from tests.helpers.text_model import save_text_model


def test_a_reader_of_hydras_output_that_leaves():
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "rollout.cli", "--cfg", "job"],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_SECONDS,
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_ranks_that_fail_end_with_their_own_code_and_leave_no_folder(tmp_path):
    launcher = [sys.executable, "-m", "rollout.parallel.launcher", "2"]
    ended = subprocess.run(
        [*launcher, "timeit", "--nonsense"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert not list(tmp_path.iterdir())
    assert ended.returncode == 2
    assert "option --nonsense not recognized" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("generate", "--- prompt 1, sample 1:"),
        ("stream", "drafts accepted"),
        ("update_weights", "weight version 1: "),
        ("external_corpus", "answers: published, "),
    ],
)
def test_an_example_runs(name, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, str(save_text_model(tmp_path / "model"))])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert shown in capsys.readouterr().out
