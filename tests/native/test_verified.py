"""Estimates stay true when only the first proposed nodes are verified, if the corpus is told.

Made-up responses are replayed as an engine does: what is emitted is the longest verified path that
comes true and one token more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from ngram_native import Corpus
from tests.native.drafts import Drafted, extend, i32, propose

SEEDS = 3
PROMPTS, SAMPLES, EPOCHS, PHRASES = 8, 8, 4, 24
BUDGET = 16

Choice = Callable[[np.random.Generator, list[Drafted]], int]
"""How many first nodes of a tree are verified."""


def everything(_: np.random.Generator, tree: list[Drafted]) -> int:
    return len(tree)


def any_prefix(rng: np.random.Generator, tree: list[Drafted]) -> int:
    return int(rng.integers(0, len(tree) + 1))


def likely(_: np.random.Generator, tree: list[Drafted]) -> int:
    return sum(node.probability >= 0.6 for node in tree)


def drifting_epochs(rng: np.random.Generator) -> list[list[tuple[int, list[int]]]]:
    """Prompts and responses of each epoch: responses are paths through phrases of the prompt, with
    a few tokens of their own. The policy moves: between epochs some phrases are replaced."""

    def phrase() -> list[int]:
        return rng.integers(0, 30_000, rng.integers(3, 20)).tolist()

    phrases = [[phrase() for _ in range(PHRASES)] for _ in range(PROMPTS)]
    epochs = []
    for _ in range(EPOCHS):
        responses = []
        for prompt, own in enumerate(phrases):
            for _ in range(SAMPLES):
                at, response = 0, []
                for _ in range(rng.integers(5, 40)):
                    novel = rng.random() < 0.1
                    response += rng.integers(0, 30_000, 6).tolist() if novel else own[at]
                    at = (at + 1) % PHRASES if rng.random() < 0.8 else int(rng.integers(PHRASES))
                responses.append((prompt, response))
            own[int(rng.integers(PHRASES))] = phrase()
        epochs.append(responses)
    return epochs


@dataclass
class Judged:
    """Estimates and what came."""

    estimates: list[float] = field(default_factory=list)
    came: list[bool] = field(default_factory=list)

    def add(self, node: Drafted, came: bool | None) -> None:
        if came is not None:
            self.estimates.append(node.probability)
            self.came.append(came)

    def gap(self) -> float:
        """The largest between mean estimate and rate, over deciles by estimate."""
        order = np.argsort(self.estimates, kind="stable")
        estimates, came = np.array(self.estimates)[order], np.array(self.came)[order]
        ends = np.linspace(0, len(order), 11, dtype=int)
        return max(abs(float((estimates[a:b] - came[a:b]).mean())) for a, b in pairwise(ends))


def outcomes(tree: list[Drafted], to_come: list[int]) -> list[bool | None]:
    """By tree number; None where the recording ends before it is decided."""
    came: list[bool | None] = [True]
    for node in tree:
        above = came[node.parent]
        if above and node.depth > len(to_come):
            above = None
        came.append(above and to_come[node.depth - 1] == node.token)
    return came


@functools.cache
def replayed(choose: Choice) -> tuple[Judged, Judged]:
    """Judgements of verified nodes and of those next in line, which were not verified but whose
    parent was, so that the emitted tokens tell. Over a few seeds, without the first epochs."""
    verified, next_in_line = Judged(), Judged()
    for seed in range(SEEDS):
        replay(np.random.default_rng(seed), choose, verified, next_in_line)
    return verified, next_in_line


def replay(
    rng: np.random.Generator, choose: Choice, verified: Judged, next_in_line: Judged
) -> None:
    corpus = Corpus()
    for epoch, responses in enumerate(drifting_epochs(rng)):
        corpus.set_weight_version(epoch)
        for sequence_id, (prompt, _) in enumerate(responses):
            corpus.open(sequence_id, prompt, i32([prompt]))
        running = {sequence_id: tokens for sequence_id, (_, tokens) in enumerate(responses)}
        while running:
            counts, emitted = [], {}
            trees = propose(corpus, running, BUDGET)
            for (sequence_id, to_come), tree in zip(running.items(), trees, strict=True):
                count = choose(rng, tree)
                came = outcomes(tree, to_come)
                accepted = sum(right is True for right in came[1 : count + 1])
                for j, node in enumerate(tree):
                    if epoch > 0 and node.parent <= count:
                        (verified if j < count else next_in_line).add(node, came[j + 1])
                emitted[sequence_id] = to_come[: accepted + 1]
                counts.append(count)
            extend(corpus, emitted, counts)
            running = {s: left for s in running if (left := running[s][len(emitted[s]) :])}
        for sequence_id in range(len(responses)):
            corpus.close(sequence_id)


@pytest.mark.parametrize("choose", [any_prefix, likely])
def test_estimates_stay_as_true_as_with_everything_verified(choose):
    of_everything, _ = replayed(everything)
    verified, next_in_line = replayed(choose)
    assert of_everything.gap() < 0.035
    assert verified.gap() < 0.035
    assert next_in_line.gap() < 0.08
    assert len(verified.came) > 100_000
    assert len(next_in_line.came) > 5000
