"""The examples as they stand, which take the GPU by themselves; on tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.text_model import save_text_model

ROOT = Path(__file__).parents[2]
GRPO = [
    "--steps=2", "--prompts=4", "--samples=4", "--max-new-tokens=5", "--held-out=2", "--shots=1",
]  # fmt: skip
TRL = ["--max-steps", "2", "--max-completion-length", "12"]
WITHOUT_GPU = {
    "fetch_demo_model", "gguf_reader", "grpo_log", "make_demo_prompts", "open_requests",
    "plot_grpo", "sums_task", "token_tree",
}  # fmt: skip
ELSEWHERE = {"verl_grpo"}  # make test-verl: in an environment of its own


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("text") / "model")


def run(name: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("generate", "--- prompt 1, sample 1:"),
        ("stream", "drafts accepted"),
        ("update_weights", "weight version 1: "),
        ("external_corpus", "answers: published, "),
    ],
)
def test_an_example_runs(name: str, shown: str, model: Path) -> None:
    assert shown in run(name, model)


def test_grpo_with_deepspeed(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("reasoning_gym")
    log = tmp_path / "log.jsonl"
    run("grpo_deepspeed", "--model", model, "--output", log, *GRPO)
    assert len(log.read_text().splitlines()) >= 2


def test_grpo_with_trl(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("reasoning_gym")
    assert "reward by step" in run("trl_grpo", model, "--output-dir", tmp_path, *TRL)


def test_every_example_is_run_or_needs_no_gpu() -> None:
    tried = {"generate", "stream", "update_weights", "external_corpus", "grpo_deepspeed"}
    named = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert named == tried | {"trl_grpo"} | WITHOUT_GPU | ELSEWHERE
