"""Prompts that no demo draft was trained on: the demo's own, of all its tasks alike."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from rollout.types import Prompt

DEFAULT_PROMPTS = Path("runs/demo/prompts.jsonl")


def held_out_prompts(path: Path, count: int, *, with_answers: bool = False) -> list[Prompt]:
    """The first ones of each task, the tasks taking turns.

    ``with_answers``: only those that an answer can be checked of, as RL trains on. Raises
    FileNotFoundError, with the command that makes the file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; `make {DEFAULT_PROMPTS}` makes the demo's")
    by_task: dict[str, list[Prompt]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["answer"] is not None or not with_answers:
            by_task.setdefault(row["task"], []).append(row["messages"])
    turns = (prompts[k] for k in range(count) for prompts in by_task.values() if k < len(prompts))
    return list(islice(turns, count))
