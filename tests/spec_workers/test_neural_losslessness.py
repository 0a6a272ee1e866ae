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
from rollout.types import EntryResult
from spec_workers.neural.arrays import Arrays
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.tree_proposer import TreeProposer, TreesToGrow
from tests.helpers.levels import NoNetworks
from tests.helpers.requests import decode_batch, make_request
from tests.helpers.sampled import sample
from tests.helpers.tree_checks import check_trees
from tests.sampling.test_losslessness import CHAIN, ROOT, VOCAB, chi_square, exact_joint

DRAWS = 4000
DRAFT = CHAIN + 0.4 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))


TOPK, STEPS = 3, 3


class MarkovLevels(NoNetworks):
    """A Markov chain that is nearly the target's, as a draft's levels: hidden states are tokens."""

    def __init__(self, batch) -> None:
        last = torch.tensor([float(entry.request.tokens[-1]) for entry in batch.entries])
        self._last = last[:, None, None]

    def roots(self, inputs) -> torch.Tensor:
        return self._last

    def run(self, level, nodes, above, inputs, longest):
        tokens = torch.from_numpy(nodes.tokens_GN[:, -TOPK:, None])
        return tokens.float(), above

    def logits(self, level, hidden_RE) -> torch.Tensor:
        return DRAFT[hidden_RE[:, 0].long()]


def grown(guesser, batch):
    count = len(batch.entries)
    rows, ends = np.arange(count), np.array([entry.end for entry in batch.entries])
    proposer = TreeProposer(
        MarkovLevels(batch), guesser, Arrays(), topk=TOPK, num_steps=STEPS,
        device=torch.device("cpu"), lockstep=False,
    )  # fmt: skip
    proposal = proposer.propose(
        TreesToGrow(
            batch=batch,
            entries_G=rows.tolist(),
            rows_G=rows,
            ends_G=ends,
            sizes_G=np.full(count, 6),
            depths_G=np.full(count, STEPS),
            floor=0.01,
        )
    )
    guesser.remember(proposal)
    trees = proposal.trees(np.full(count, 6), source=0)
    check_trees(trees)
    return trees


def emit(params, draws=DRAWS):
    """Two tokens of each request, and how many of them were drafted."""
    guesser = Guesser(TOPK, token_ids_D=None)
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
