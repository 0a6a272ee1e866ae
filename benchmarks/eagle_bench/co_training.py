"""A draft that follows the policy, against the one it was when training began.

The GRPO example trains the demo model and co-trains its draft. At the end it rolls out held-out
problems twice, with either draft: the same policy, prompts and seeds, and so the same tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from table import Row, row

from eagle_bench.accept_length import NUM_NODES
from eagle_bench.entrants import Folders

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_deepspeed.py"
NUM_STEPS = 20
UPDATES = 4
"""Of the draft in a step: with as few rollouts as these, nearly as long as the step itself."""

BAR = 1.1


def co_training_rows(folders: Folders, num_steps: int = NUM_STEPS) -> list[Row]:
    """A few minutes on two cores. Raises RuntimeError where the example fails or drafts changed
    its tokens."""
    if folders.eagle3 is None:
        return []
    log = _run(folders, num_steps)
    steps = [event for event in log if event["event"] == "step"]
    (drafts,) = [event for event in log if event["event"] == "drafts"]
    if not drafts["same"]:
        raise RuntimeError("the drafts changed the tokens")
    following, frozen = drafts["accept_length_co_trained"], drafts["accept_length_frozen"]
    print(f"swaps {steps[-1]['draft']['swaps']:.0f} of {num_steps}; nats per token "
          f"{steps[0]['nll']:.2f} to {steps[-1]['nll']:.2f}", flush=True)  # fmt: skip
    co_trained = sum(event["co_train_seconds"] for event in steps)
    others = sum(event["rollout_seconds"] + event["train_seconds"] for event in steps)
    name = f"after {num_steps} GRPO steps"
    return [
        row(f"{name}, accept length: frozen draft", frozen, "tokens"),
        row(f"{name}, accept length: co-trained draft", following, "tokens"),
        row(f"{name}: co-trained to frozen", following / frozen, "x", BAR),
        row(f"{name}: co-training's share of the time", co_trained / (co_trained + others), ""),
    ]


def _run(folders: Folders, num_steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "log.jsonl"
        options = {
            "--model": folders.model,
            "--spec": "eagle",
            "--draft": folders.eagle3,
            "--draft-tokens": NUM_NODES,
            "--co-train": UPDATES,
            "--prompts": 6,
            "--samples": 4,
            "--lr": 2e-5,
            "--steps": num_steps,
            "--held-out": 12,
            "--output": output,
        }
        command = [
            sys.executable,
            str(EXAMPLE),
            *(str(x) for pair in options.items() for x in pair),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{EXAMPLE.name} failed: {done.stderr[-2000:]}")
        return [json.loads(line) for line in output.read_text().splitlines()]
