"""The examples as they stand, which take the GPU by themselves; on tiny models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.text_model import save_text_model

ROOT = Path(__file__).parents[2]
GRPO = ["--steps=2", "--prompts=4", "--samples=4", "--max-new-tokens=5", "--held-out=2"]


@pytest.mark.parametrize(
    ("name", "arguments", "shown", "needs"),
    [
        ("generate", ["{model}"], "--- prompt 1, sample 1:", ()),
        ("update_weights", ["{model}"], "weight version 1: ", ()),
        ("external_corpus", ["{model}"], "answers: published, ", ()),
        (
            "grpo_deepspeed",
            ["--model={model}", "--output={folder}/log.jsonl", "--shots=1", *GRPO],
            "",
            ("deepspeed", "reasoning_gym"),
        ),
        (
            "trl_grpo",
            ["{model}", "--output-dir={folder}", "--max-steps=2", "--max-completion-length=12"],
            "reward by step",
            ("trl", "reasoning_gym"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_example_runs(name, arguments, shown, needs, tmp_path: Path) -> None:
    for package in needs:
        pytest.importorskip(package)
    model = save_text_model(tmp_path / "model")
    given = [each.format(model=model, folder=tmp_path) for each in arguments]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *given],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert shown in done.stdout
