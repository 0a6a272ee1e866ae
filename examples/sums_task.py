"""A task for the training example: sums of one-digit numbers, made and scored by reasoning-gym."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import reasoning_gym

Problem = dict[str, Any]  # reasoning-gym's entry: question, answer, metadata
Messages = list[dict[str, str]]


class SumsTask:
    """Problems to train on and others held out; solved examples in the prompt are in neither."""

    def __init__(self, terms: int, shots: int) -> None:
        self._dataset: Any = reasoning_gym.create_dataset(
            "chain_sum", size=4000, seed=0,
            min_terms=terms, max_terms=terms, min_digits=1, max_digits=1,
        )  # fmt: skip
        problems = list({problem["question"]: problem for problem in self._dataset}.values())
        held_out = shots + len(problems) // 4
        self._shots = problems[:shots]
        self.held_out = problems[shots:held_out]
        self.train = problems[held_out:]
        answers = Counter(problem["answer"] for problem in self.train)
        self._most_common = answers.most_common(1)[0][0]

    def prompt(self, problem: Problem) -> Messages:
        """Chat messages: the solved examples, then the problem."""
        turns: Messages = []
        for shot in self._shots:
            turns += [_turn("user", shot["question"]), _turn("assistant", _worked(shot))]
        return [*turns, _turn("user", problem["question"])]

    def reward(self, text: str, problem: Problem) -> float:
        """1 where the last number of the text is the answer, else 0."""
        numbers = re.findall(r"-?\d+", text)
        return float(bool(numbers) and self._score(numbers[-1], problem) == 1)

    def majority_reward(self, problems: Sequence[Problem]) -> float:
        """The mean reward for always giving the answer that is most common in training."""
        return fmean(self.reward(self._most_common, problem) for problem in problems)

    def _score(self, answer: str, problem: Problem) -> float:
        return self._dataset.score_answer(answer, problem)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _worked(problem: Problem) -> str:
    """From left to right, a line for each term: 8 + 8 = 16, then 16 - 4 = 12."""
    so_far, *rest = problem["metadata"]["expression"].split()
    lines = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        total = int(so_far) + int(sign + term)
        lines.append(f"{so_far} {sign} {term} = {total}")
        so_far = str(total)
    return "\n".join(lines)
