"""Prompts: open questions, text to repeat, tasks with answers, and those no demo draft has seen."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.types import Prompt

OPEN_PROMPTS = [
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how a bicycle stays upright while it is moving.",
    "What should a beginner know before planting a vegetable garden?",
    "Describe a busy morning market in a coastal town.",
    "Give three reasons why people enjoy long train journeys.",
    "How would you explain gravity to a child of six?",
    "Write a letter to a friend about moving to a new city.",
    "What are the advantages and disadvantages of working from home?",
]

_PARAGRAPH = (
    "The river rises in the hills above the village and runs past the old mill, the stone bridge "
    "and the school. In spring it floods the lower meadows, and the farmers move their sheep to "
    "the upper fields. In summer children swim below the bridge, and in autumn the mill pond is "
    "covered with yellow leaves."
)
_LIST = "\n".join(f"{n}. Item number {n} costs {n * 10} dollars." for n in range(1, 13))

REPETITIVE_PROMPTS = [
    f"Repeat the following text exactly, word for word:\n\n{_PARAGRAPH}",
    f"Continue this list up to item 30 in the same format:\n\n{_LIST}",
    f"Rewrite this text, replacing the word river by stream and nothing else:\n\n{_PARAGRAPH}",
    'Write a JSON array of 12 objects, each with the keys "id", "name" and "city".',
]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def reasoning_prompts(count: int, task: str = "gsm_symbolic") -> list[Prompt]:
    """Problems of a reasoning-gym task; grade-school mathematics unless another is named."""
    import reasoning_gym

    dataset: Any = reasoning_gym.create_dataset(task, size=count, seed=11)
    return [chat(dataset[i]["question"]) for i in range(count)]


def held_out_prompts(path: Path, count: int, *, with_answers: bool = False) -> list[Prompt]:
    """The first prompts of each task in a file of JSON lines, the tasks taking turns.

    ``with_answers``: only those whose answer can be checked, as RL trains on. Raises
    FileNotFoundError, with the command that makes the file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; `make runs/demo/prompts.jsonl` makes it")
    by_task: dict[str, list[Prompt]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["answer"] is not None or not with_answers:
            by_task.setdefault(record["task"], []).append(record["messages"])
    turns = (prompts[k] for k in range(count) for prompts in by_task.values() if k < len(prompts))
    return list(islice(turns, count))
