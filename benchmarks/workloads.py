"""Prompts for the benchmarks: open questions, text to repeat, and tasks with answers."""

from __future__ import annotations

from typing import Any

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


def reasoning_prompts(count: int, seed: int = 11) -> list[list[dict[str, str]]]:
    """Grade-school mathematics from reasoning-gym."""
    import reasoning_gym

    dataset: Any = reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=seed)
    return [chat(dataset[i]["question"]) for i in range(count)]
