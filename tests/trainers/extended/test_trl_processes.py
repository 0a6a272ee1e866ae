"""GRPO in two processes, each with an engine of its own, and with one of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("deepspeed")

from tests.helpers.launch import launch
from tests.helpers.text_model import save_text_model
from tests.helpers.trl_runs import by_generation, run


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_two_processes_share_the_samples_of_one(tmp_path: Path) -> None:
    model = save_text_model(tmp_path / "model")
    options = {"per_device_train_batch_size": 8, "num_generations": 8, "max_steps": 1}
    (samples,) = run(by_generation(model, tmp_path / "alone", **options)).completion_ids
    first, second = launch("tests.trainers.extended.trl_ranks", tmp_path, ranks=2)
    for way in ("replicated", "tensor", "zero3"):
        assert first[way] + second[way] == samples, way
