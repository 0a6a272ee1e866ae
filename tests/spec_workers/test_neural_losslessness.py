"""The distribution of what is emitted is the target's, though drafts look up its noise.

As in `test_losslessness`, but each request's tree is grown for it: by a draft that is nearly the
target, through the real guesses and the real growth.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.ops.tree_accept.reference import walk
from rollout.sampling.rows import sample_rows
from rollout.sampling.sampler import sample
from rollout.types import EntryResult
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.tree_growth import TreeGrowth
from tests.helpers.requests import decode_batch, make_request
from tests.helpers.tree_checks import check_trees
from tests.sampling.test_losslessness import CHAIN, ROOT, VOCAB, chi_square, exact_joint

DRAWS = 4000
DRAFT = CHAIN + 0.4 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))


def grown(guesser, batch, *, steps=3):
    """Trees of a Markov chain that is nearly the target's."""
    count = len(batch.entries)
    guesses = guesser.begin(batch, list(range(count)))
    growth = TreeGrowth(np.full(count, 6), np.full(count, steps), topk=3, max_nodes=6, floor=0.01)
    last = torch.tensor([entry.request.tokens[-1] for entry in batch.entries])
    roots = np.arange(count), np.zeros(count, dtype=np.int64)
    growth.add(None, *guesser.children(guesses, DRAFT[last], *roots))
    for _ in range(steps - 1):
        level = growth.expand()
        guesses.levels.append(level)
        logits = DRAFT[torch.from_numpy(level.tokens_F)]
        growth.add(level, *guesser.children(guesses, logits, level.trees_F, level.depths_F))
    trees = growth.finish(source=0)
    check_trees(trees)
    return trees


def emit(params, draws=DRAWS):
    """Two tokens of each request, and how many of them were drafted."""
    guesser = Guesser(topk=3, token_ids_D=None)
    requests = [make_request([5, ROOT], seed=seed, **params) for seed in range(draws)]
    accepted = 0
    for start in range(0, draws, 500):  # the guesses learn from one to the next
        todo = requests[start : start + 500]
        while todo:
            batch = decode_batch(todo)
            trees = grown(guesser, batch)
            rows, offsets = sample_rows(batch, trees)
            last = [
                rows.drafted[r][-1] if rows.drafted[r] else rows.requests[r].tokens[-1]
                for r in range(len(rows.requests))
            ]
            sampled = sample(CHAIN[last], rows)
            results = []
            for b in range(len(todo)):
                own = sampled.tokens[offsets[b] : offsets[b + 1]]
                nodes = slice(int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1]))
                path = walk(trees.tokens_N[nodes].tolist(), trees.parents_N[nodes].tolist(), own)
                tokens = [own[0], *(own[node] for node in path)]
                results.append(EntryResult(token_ids=tokens, path=path))
                accepted += len(path)
            guesser.learn(batch, results)
            for request, result in zip(todo, results, strict=True):
                request.tokens += result.token_ids
            todo = [request for request in todo if len(request.tokens) < 4]
    return np.array([request.tokens[2:4] for request in requests]), accepted


@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_emitted_pairs_follow_the_target(temperature):
    pairs, accepted = emit({"temperature": temperature})
    assert chi_square(pairs, exact_joint(temperature)) > 1e-4
    assert accepted > 0.9 * DRAWS


def test_truncation_follows_the_exact_distribution():
    def top4(token):
        return CHAIN[token] >= CHAIN[token].sort(descending=True).values[3]

    pairs, accepted = emit({"temperature": 0.8, "top_k": 4}, draws=DRAWS // 2)
    assert chi_square(pairs, exact_joint(0.8, top4)) > 1e-4
    assert accepted > 0.45 * DRAWS
