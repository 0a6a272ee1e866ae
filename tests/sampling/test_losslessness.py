"""The distribution of what is emitted is the target's, whatever is drafted.

A made-up target, a Markov chain whose logits depend on the last token alone, is sampled through
the real rows, sampler and acceptance, with drafts of every kind; two emitted tokens are compared
with the exact joint distribution.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from rollout.ops.tree_accept.reference import walk
from rollout.sampling.rows import sample_rows
from tests.helpers.requests import decode_batch, make_request, make_trees
from tests.helpers.sampled import sample

VOCAB = 12
DRAWS = 6_000  # a twentieth of wrong tokens is noticed from 2,000 on
MANY_DRAWS = 20_000  # a temperature wrong by a twentieth, from here on
CHAIN = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5


def rare(token: int) -> int:
    return int(CHAIN[token].argmin())


def likely(token: int) -> int:
    return int(CHAIN[token].argmax())


ROOT = 3
DRAFTS = {
    "empty": ([], []),
    "right": ([likely(ROOT), likely(likely(ROOT))], [0, 1]),
    "wrong": ([rare(ROOT), rare(rare(ROOT))], [0, 1]),
    "repeated": ([ROOT, ROOT, ROOT], [0, 1, 2]),
    "token 0": ([0, 0, 0, 0], [0, 1, 2, 3]),
    "siblings of low probability": ([rare(ROOT), 0, 1, 2], [0, 0, 0, 0]),
    "equal siblings": ([likely(ROOT)] * 3, [0, 0, 0]),
    "every token": (list(range(VOCAB)) + list(range(VOCAB)), [0] * VOCAB + [1] * VOCAB),
}


def emit(draft, params, draws=DRAWS):
    """Two tokens of each of ``draws`` requests: by one tree verify, then by another if needed."""
    requests = [make_request([5, ROOT], seed=seed, **params) for seed in range(draws)]
    first = [0] * draws
    pairs = np.zeros((draws, 2), dtype=np.int64)
    for _ in range(2):
        todo = [i for i in range(draws) if first[i] < 2]
        trees = make_trees([draft] * len(todo))
        batch = decode_batch([requests[i] for i in todo])
        rows, offsets = sample_rows(batch, trees)
        last = [
            rows.drafted[r][-1] if rows.drafted[r] else rows.requests[r].tokens[-1]
            for r in range(len(rows.requests))
        ]
        sampled = sample(CHAIN[last], rows)
        for b, i in enumerate(todo):
            own = sampled.tokens[offsets[b] : offsets[b + 1]]
            path = walk(draft[0], draft[1], own)
            for token in [own[0], *(own[node] for node in path)][: 2 - first[i]]:
                pairs[i, first[i]] = token
                requests[i].tokens.append(token)
                first[i] += 1
    return pairs


def exact_joint(temperature, allowed=None):
    def row(token):
        logits = CHAIN[token].double() / temperature
        if allowed is not None:
            logits = torch.where(allowed(token), logits, float("-inf"))
        return logits.softmax(0).numpy()

    return np.stack([row(ROOT)[a] * row(a) for a in range(VOCAB)])


def chi_square(pairs, joint):
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    assert counts[joint == 0].sum() == 0, "a token of probability zero was emitted"
    expected = (joint * len(pairs)).ravel()
    counts = counts.ravel()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    keep = wanted > 0
    return stats.chisquare(observed[keep], wanted[keep]).pvalue


def test_emitted_pairs_follow_the_target():
    plain = emit(DRAFTS["empty"], {"temperature": 0.8}, MANY_DRAWS)
    assert chi_square(plain, exact_joint(0.8)) > 1e-4
    drafted = emit(DRAFTS["every token"], {"temperature": 0.8})
    assert chi_square(drafted, exact_joint(0.8)) > 1e-4
    drafted[: DRAWS // 20, 0] = 0
    assert chi_square(drafted, exact_joint(0.8)) < 1e-4, "a biased sampler is noticed"


def test_drafts_cannot_be_seen_in_the_output():
    params = {"temperature": 1.3, "top_p": 0.9}
    plain = emit(DRAFTS["empty"], params, draws=500)
    for name, draft in DRAFTS.items():
        assert np.array_equal(emit(draft, params, draws=500), plain), name


def test_truncation_follows_the_exact_distribution():
    def top4(token):
        return CHAIN[token] >= CHAIN[token].sort(descending=True).values[3]

    def nucleus(token):
        probs, order = (CHAIN[token].double() / 0.8).softmax(0).sort(descending=True)
        kept = (probs.cumsum(0) - probs) < 0.7
        return torch.zeros(VOCAB, dtype=torch.bool).scatter(0, order[kept], True)

    def above(token):
        probs = (CHAIN[token].double() / 0.8).softmax(0)
        return probs >= 0.2 * probs.max()

    for draft, cut, allowed in (
        ("every token", {"top_k": 4}, top4),
        ("every token", {"top_p": 0.7}, nucleus),
        ("right", {"min_p": 0.2}, above),
    ):
        pairs = emit(DRAFTS[draft], {"temperature": 0.8} | cut)
        assert chi_square(pairs, exact_joint(0.8, allowed)) > 1e-4, cut
