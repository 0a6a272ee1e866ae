"""The tokens a tree would have brought, by the tokens that were emitted without it."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.types import EntryResult, FinishReason
from spec_workers.hybrid.neural_gate import accepted_in_hindsight, agreement
from tests.helpers.requests import make_trees


def by_walking(trees, values, results):
    """The same, one entry and one token at a time."""
    found = []
    for b, result in enumerate(results):
        nodes = range(int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1]))
        at, accepted = 0, 0
        for token in result.token_ids:
            children = [
                number
                for number, n in enumerate(nodes, start=1)
                if trees.parents_N[n] == at and trees.tokens_N[n] == token
            ]
            if not children:
                break
            at, accepted = children[0], accepted + 1
        ended = result.finish_reason is not None
        if ended:
            accepted = min(accepted, len(result.token_ids) - 1)
        elif accepted and accepted == len(result.token_ids):
            below = {at}
            for number, n in enumerate(nodes, start=1):
                if trees.parents_N[n] in below:
                    below.add(number)
                    accepted += values[n] / values[nodes[at - 1]]
        found.append(accepted)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_as_by_walking(seed):
    rng = np.random.default_rng(seed)
    per_entry, results = [], []
    for _ in range(30):
        size = int(rng.integers(0, 64))
        taken, tokens, parents = set(), [], []
        for j in range(1, size + 1):
            parent = int(rng.integers(max(0, j - 4), j))
            token = next(t for t in rng.permutation(9).tolist() if (parent, t) not in taken)
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
        per_entry.append((tokens, parents))
        path, at = [], 0  # what agrees for a while
        while rng.random() < 0.8:
            children = [j for j, parent in enumerate(parents, start=1) if parent == at]
            if not children:
                break
            at = int(rng.choice(children))
            path.append(tokens[at - 1])
        ended = FinishReason.STOP if rng.random() < 0.3 else None
        wrong = [99] * int(rng.integers(0 if path else 1, 2))
        results.append(EntryResult(token_ids=path + wrong, finish_reason=ended))
    trees = make_trees(per_entry)
    values = 0.8**trees.depths_N
    found = accepted_in_hindsight(trees, values, results, agreement(trees, results))
    np.testing.assert_allclose(found, by_walking(trees, values, results))
    assert (found > 0).any()


def test_entries_that_sampled_nothing_and_batches_of_nobody():
    trees, nothing = make_trees([([], []), ([4], [0])]), make_trees([])
    results = [EntryResult(), EntryResult(token_ids=[4, 5])]
    found = accepted_in_hindsight(trees, np.ones(1), results, agreement(trees, results))
    assert found.tolist() == [0.0, 1.0]
    found = accepted_in_hindsight(nothing, np.zeros(0), [], agreement(nothing, []))
    assert found.tolist() == []
