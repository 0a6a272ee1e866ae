"""GRPO in two processes, each with an engine of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.helpers.text_model import save_text_model
from tests.helpers.trl_runs import by_rollout_func, run

TIMEOUT = 240.0  # seconds; idle it takes about 15
ROOT = Path(__file__).parents[2]


def run_ranks(*arguments: str, size: int = 2) -> None:
    """Raises when a process fails or hangs; ends all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    try:
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.trainers.trl_ranks", *arguments],
                    env=environment, cwd=ROOT, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
            )
        for process in processes:
            output, _ = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize(("way", "sharding"), [("func", ()), ("class", ("--zero3",))])
def test_two_processes(tmp_path: Path, way: str, sharding: tuple[str, ...]) -> None:
    if sharding:
        pytest.importorskip("deepspeed")
    model = save_text_model(tmp_path / "model")
    run_ranks("--model", str(model), "--output", str(tmp_path), "--way", way, *sharding)
    ranks: list[dict[str, Any]] = [
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)
    ]
    assert [rank["version"] for rank in ranks] == [2, 2]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    first = [*ranks[0]["completion_ids"][0], *ranks[1]["completion_ids"][0]]
    # One process draws the same samples for the same prompts.
    alone = by_rollout_func(
        model, tmp_path / "alone", per_device_train_batch_size=8, num_generations=8, max_steps=1
    )
    assert run(alone).completion_ids[0] == first
    if way == "class":
        differences = [
            entry["sampling/sampling_logp_difference/max"]
            for entry in ranks[0]["logs"]
            if "sampling/sampling_logp_difference/max" in entry
        ]
        assert len(differences) == 2
        assert max(differences) < 2e-5
