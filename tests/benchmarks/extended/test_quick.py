"""Every benchmark runs from end to end at its smallest size, and writes its rows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.rows import read_records

from tests.helpers.text_model import save_text_model
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama

ROOT = Path(__file__).parents[3]
NAMES = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
OF_THE_DEMO_MODEL = {
    "bench_cluster", "bench_exact", "bench_server", "bench_turns",
    "bench_weights",
}  # fmt: skip
IN_OTHER_ENVIRONMENTS = {"bench_vllm"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The options that name tiny models, by benchmark."""
    folder = tmp_path_factory.mktemp("models")
    text = save_text_model(folder / "text", max_positions=2048)
    target = save_tiny_llama(folder / "target")
    for file in text.glob("*token*"):  # its tokenizer
        shutil.copy(file, target)
    eagle3 = save_tiny_eagle3(folder / "eagle3", target)
    draft = ["--model", str(target), "--draft", str(eagle3)]
    drafts = {"bench_budget": draft, "bench_eagle": draft}
    return {name: ["--model", str(text)] for name in OF_THE_DEMO_MODEL} | drafts


@pytest.mark.parametrize("name", sorted(NAMES - IN_OTHER_ENVIRONMENTS))
def test_quick_run(name: str, models: dict[str, list[str]], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["--quick", "--json", str(rows), *models.get(name, [])]
    run = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert read_records(rows)
