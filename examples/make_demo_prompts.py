"""Writes the demo's prompts: school problems with their answers, and open requests.

The problems are made by reasoning-gym, as chat messages; their answers go along as an extra
column, which the job carries through to the rollouts.

    python examples/make_demo_prompts.py [--output FILE] [--problems N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reasoning_gym

DEFAULT_OUTPUT = Path(__file__).parent.parent / "runs" / "demo" / "prompts.jsonl"
SEED = 7

GENERATORS: dict[str, dict[str, Any]] = {
    "gsm_symbolic": {},
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
}
INSTRUCTION = "\nThink step by step, then give the result after 'Answer:'."

OPEN_REQUESTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List the planets of the solar system, each with one fact.",
    "Write a Python function that tells whether a word is a palindrome.",
    "Give me a recipe for tomato soup, with amounts.",
    "What are the advantages and disadvantages of working from home?",
    "Write a polite email asking a colleague to move a meeting to Friday.",
    "Summarize how a bicycle stays upright.",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "Describe a day at the sea in four lines that rhyme.",
    "Explain the difference between a virus and a bacterium.",
    "Suggest ten names for a small bakery.",
)


def problems(count: int) -> Iterator[dict[str, Any]]:
    """``count`` problems, the generators taking turns."""
    datasets = {
        name: iter(reasoning_gym.create_dataset(name, size=count, seed=SEED, **options))
        for name, options in GENERATORS.items()
    }
    for index in range(count):
        task = list(datasets)[index % len(datasets)]
        problem = next(datasets[task])
        yield row(problem["question"] + INSTRUCTION, task, problem["answer"])


def row(request: str, task: str, answer: str | None) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": request}], "task": task, "answer": answer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE")
    parser.add_argument("--problems", type=int, default=12, metavar="N")
    args = parser.parse_args()
    rows = [*problems(args.problems), *(row(text, "open", None) for text in OPEN_REQUESTS)]
    lines = "".join(json.dumps(each) + "\n" for each in rows)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(lines)
    print(f"wrote {len(rows)} prompts to {args.output}")


if __name__ == "__main__":
    main()
