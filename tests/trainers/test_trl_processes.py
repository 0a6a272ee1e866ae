"""GRPO in two processes, each with an engine of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("deepspeed")

from tests.helpers.launch import launch
from tests.helpers.text_model import save_text_model
from tests.helpers.trl_runs import by_rollout_func, run

# Idle each takes about 15 seconds; the first of all also compiles a part of DeepSpeed.
TIMEOUT = 240.0


@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("way", "zero3"), [("rollout_func", False), ("generation", True)])
def test_two_processes(tmp_path: Path, way: str, zero3: bool) -> None:
    model = save_text_model(tmp_path / "model")
    (tmp_path / "options.json").write_text(json.dumps({"way": way, "zero3": zero3}))
    ranks = launch("tests.trainers.trl_ranks", tmp_path, ranks=2, timeout=TIMEOUT)
    assert [rank["version"] for rank in ranks] == [2, 2]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    for rank in ranks:
        assert len(rank["logp_differences"]) == (2 if way == "generation" else 0)
        assert all(difference < 2e-5 for difference in rank["logp_differences"])
    # One process draws the same samples of the same prompt.
    alone = by_rollout_func(
        model, tmp_path / "alone", per_device_train_batch_size=8, num_generations=8, max_steps=1
    )
    first = [*ranks[0]["completion_ids"][0], *ranks[1]["completion_ids"][0]]
    assert run(alone).completion_ids[0] == first
