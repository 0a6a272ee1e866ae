"""What a draft learns of a step: each emitted token against the guesses made where it came."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.ops.uniforms import reference
from rollout.types import EntryResult
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.tree_growth import TreeGrowth
from tests.helpers.requests import decode_batch, make_request

VOCAB = 12


@pytest.fixture
def learned(monkeypatch):
    """A guesser with two trees grown to their second level, and what its mixture is told."""
    guesser = Guesser(2, None)
    told: list[tuple] = []
    monkeypatch.setattr(guesser._mixture, "learn", lambda *rows: told.append(rows))
    requests = [make_request([3] * 4, request_id=b, temperature=0.0) for b in range(3)]
    batch = decode_batch(requests)
    guesses = guesser.begin(batch, [0, 2])
    growth = TreeGrowth(np.array([6, 6]), np.array([3, 3]), topk=2, max_nodes=4, floor=0.0)
    trees, depths = np.arange(2), np.zeros(2, dtype=np.int64)
    growth.add(None, *guesser.children(guesses, likeliest([[5, 6], [7, 8]]), trees, depths))
    level = growth.expand()
    guesses.levels.append(level)
    assert level.tokens_F.tolist() == [5, 6, 7, 8]
    below = likeliest([[1, 2], [3, 4], [9, 10], [10, 11]])
    guesser.children(guesses, below, level.trees_F, level.depths_F)
    return guesser, batch, told


def likeliest(pairs: list[list[int]]) -> torch.Tensor:
    """Logits with two likely tokens in each row, the first the likelier."""
    logits = torch.zeros(len(pairs), VOCAB)
    for row, (first, second) in enumerate(pairs):
        logits[row, first], logits[row, second] = 4.0, 3.5
    return logits


def results(*emitted: list[int]) -> list[EntryResult]:
    return [EntryResult(token_ids=tokens) for tokens in emitted]


def test_tokens_are_followed_down_the_nodes_that_were_run(learned):
    guesser, batch, told = learned
    guesser.learn(batch, results([6, 3, 1], [5, 1], [7, 11]))
    ((contexts, components, came_true),) = told
    assert len(contexts) == 4  # 6 and 3 of the first tree; 7 and 11 of the second
    assert (came_true.sum(axis=1) == 1).all()
    first_of = components[:, :, 0][came_true]
    highest = components[:, :, 0].max(axis=1)
    assert (first_of == highest).tolist() == [False, True, True, False]
    assert contexts[0] == contexts[2]
    assert contexts[0] != contexts[1]  # one level further down


def test_another_steps_tokens_tell_nothing(learned):
    guesser, batch, told = learned
    others = [decode_batch([make_request()]) for _ in range(3)]
    guesser.learn(others[0], results([6]))
    for other in others[1:]:
        guesser.begin(other, [])
    guesser.learn(batch, results([6], [5], [7]))  # they are not waited for any longer
    assert not told


def test_of_two_steps_under_way_each_tells_its_own(learned):
    guesser, batch, told = learned
    guesser.begin(decode_batch([make_request()]), [])
    guesser.learn(batch, results([6], [5], [7]))
    assert len(told) == 1
    guesser.learn(batch, results([6], [5], [7]))
    assert len(told) == 1


def test_noise_is_that_of_the_position_guessed_at():
    """A flat draft has the token at the noise for its best."""
    guesser = Guesser(1, None)
    requests = [make_request([3] * length, seed=length, temperature=1.0) for length in (4, 9)]
    guesses = guesser.begin(decode_batch(requests), [0, 1])
    trees, depths = np.array([0, 1, 1]), np.array([0, 0, 2])
    tokens, _ = guesser.children(guesses, torch.zeros(3, VOCAB), trees, depths)
    noise = reference.noise(np.array([4, 9, 9], dtype=np.uint64), np.array([4, 9, 11]))
    assert tokens[:, 0].tolist() == (noise * VOCAB).astype(int).tolist()
