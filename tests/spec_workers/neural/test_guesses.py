"""Guesses behind each node, against what the target samples with the same noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.ops.categorical import categorical
from rollout.types import EntryResult
from spec_workers.neural.guesses import Guesser, noise_inputs
from spec_workers.neural.proposal import Proposal
from tests.helpers.requests import decode_batch, make_request

VOCAB, ROWS, LEVELS = 90, 256, 3
LENGTH = 10


def inputs_of(guesser: Guesser, requests: list, padding: int = 0) -> dict[str, torch.Tensor]:
    ends = np.full(len(requests), LENGTH)
    given = noise_inputs(requests, ends, padding, LEVELS) | {"ratios": guesser.ratios()}
    return {name: torch.from_numpy(array) for name, array in given.items()}


def children(guesser, logits, requests, level=0, padding=0):
    inputs, trees = inputs_of(guesser, requests, padding), torch.arange(len(logits))
    return guesser.children(logits.clone(), inputs, trees, level)


def proposal_of(batch, tokens_RW, probs_RW) -> Proposal:
    """The guesses behind the root of each request's tree."""
    return Proposal(
        batch=batch, entries_G=list(range(len(tokens_RW))), topk=tokens_RW.shape[1],
        tokens_GC=tokens_RW.numpy().astype(np.int32), probs_GC=probs_RW.numpy(),
        candidates_GN=np.zeros((len(tokens_RW), 0), dtype=np.int32),
    )  # fmt: skip


def coverage(temperature: float, *, knows_noise: bool, error=1.0, topk=4, rounds=12):
    """Claimed and found shares of tokens that are among the guesses of a draft that is off by
    ``error``, after some rounds of learning."""
    guesser = Guesser(topk, LEVELS, None)
    claimed = found = 0.0
    for round_ in range(rounds):
        seeds = range(ROWS * round_, ROWS * (round_ + 1))
        params = {"temperature": temperature}
        requests = [make_request([3] * LENGTH, request_id=s, seed=s, **params) for s in seeds]
        generator = torch.Generator().manual_seed(round_)
        target = 2 * torch.randn(ROWS, VOCAB, generator=generator)
        draft = target + error * torch.randn(ROWS, VOCAB, generator=generator)
        uniforms = inputs_of(guesser, requests)["uniforms"][:, 0].double()
        if not knows_noise:
            uniforms = torch.rand(ROWS, generator=generator, dtype=torch.float64)
        is_sampled = torch.full((ROWS,), float(temperature > 0))
        sampled = categorical(target / (temperature or 1), is_sampled, uniforms)[0].tolist()
        tokens, probs = children(guesser, draft, requests)
        batch = decode_batch(requests)
        guesser.remember(proposal_of(batch, tokens, probs))
        guesser.learn(batch, [EntryResult(token_ids=[token]) for token in sampled])
        if round_ >= rounds // 2:
            claimed += float(probs.sum())
            found += sum(token in own for token, own in zip(sampled, tokens.tolist(), strict=True))
    count = ROWS * (rounds - rounds // 2)
    return claimed / count, found / count


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_guesses_come_true_as_often_as_they_say(temperature) -> None:
    claimed, found = coverage(temperature, knows_noise=True)
    assert claimed == pytest.approx(found, rel=0.1)


def test_the_noise_tells_more_than_the_likeliest_tokens() -> None:
    (_, with_noise), (_, without) = (coverage(1.0, knows_noise=knows) for knows in (True, False))
    assert with_noise > 1.05 * without


def test_each_request_is_guessed_for_as_it_is_sampled() -> None:
    """A greedy one by the draft's probabilities, a hot one with a flatter distribution; tokens are
    the target's, and padding with undefined logits changes nothing."""
    params = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 2.0}]
    requests = [make_request([3] * LENGTH, seed=7, **each) for each in params]
    guesser = Guesser(3, LEVELS, torch.arange(VOCAB) * 3)
    row = 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    logits = torch.cat([row.expand(3, -1), torch.full((2, VOCAB), float("nan"))])
    tokens, probs = children(guesser, logits, requests, level=1, padding=2)
    best = torch.softmax(row[0], 0).topk(3)
    assert tokens[0].tolist() == (best.indices * 3).tolist()
    torch.testing.assert_close(probs[0], best.values)
    assert probs[2].max() < probs[1].max()
    assert probs[:3].isfinite().all()
    assert (probs[:, :-1] >= probs[:, 1:])[:3].all()


def test_a_vocabulary_may_be_smaller_than_the_children_and_there_may_be_no_rows() -> None:
    guesser, requests = Guesser(5, LEVELS, None), [make_request(), make_request(request_id=1)]
    tokens, probs = children(guesser, torch.zeros(2, 3), requests)
    assert tokens.sort(dim=1).values.tolist() == [[0, 1, 2]] * 2
    assert probs.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert children(guesser, torch.zeros(0, VOCAB), requests, 1)[0].shape == (0, 5)
