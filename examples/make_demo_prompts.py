"""Writes the demo's prompts: school problems with their answers, and open requests.

The problems are made by reasoning-gym, as chat messages; their answers go along as an extra
column, which the job carries through to the rollouts.

    python examples/make_demo_prompts.py [--output FILE] [--problems N] [--training]

``--training`` writes prompts to train a draft on instead: problems of other seeds and the requests
of open_requests.py. The demo's own are not among them and stay held out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reasoning_gym
from open_requests import open_requests

DEFAULT_OUTPUT = Path(__file__).parent.parent / "runs" / "demo" / "prompts.jsonl"
SEED = 7
TRAINING_SEED = 100_000  # reasoning-gym's problem i of seed s is problem 0 of seed s + i

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


def problems(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """``count`` problems, the generators taking turns."""
    datasets = {
        name: iter(reasoning_gym.create_dataset(name, size=count, seed=seed, **options))
        for name, options in GENERATORS.items()
    }
    for index in range(count):
        task = list(datasets)[index % len(datasets)]
        problem = next(datasets[task])
        yield row(problem["question"] + INSTRUCTION, task, problem["answer"])


def demo_rows(num_problems: int) -> Iterator[dict[str, Any]]:
    yield from problems(num_problems, SEED)
    yield from (row(text, "open", None) for text in OPEN_REQUESTS)


def training_rows(num_problems: int) -> Iterator[dict[str, Any]]:
    """The open requests, spread evenly among the problems."""
    made = 0
    requests = list(open_requests(TRAINING_SEED))
    for index, problem in enumerate(problems(num_problems, TRAINING_SEED), start=1):
        yield problem
        due = index * len(requests) // num_problems
        yield from (row(text, "open", None) for text in requests[made:due])
        made = due


def row(request: str, task: str, answer: str | None) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": request}], "task": task, "answer": answer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE")
    parser.add_argument("--problems", type=int, default=12, metavar="N")
    parser.add_argument("--training", action="store_true")
    args = parser.parse_args()
    rows = list((training_rows if args.training else demo_rows)(args.problems))
    lines = "".join(json.dumps(each) + "\n" for each in rows)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(lines)
    print(f"wrote {len(rows)} prompts to {args.output}")


if __name__ == "__main__":
    main()
