"""Guesses behind each node, on the host's arrays and on a device's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.ops.uniforms import reference
from rollout.types import EntryResult
from spec_workers.neural.arrays import Arrays, DeviceArrays
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.proposal import Proposal
from spec_workers.neural.shared_noise import noise_inputs
from tests.helpers.requests import decode_batch, make_request

VOCAB = 90
LEVELS = 9
ARRAYS = {"host": Arrays(), "device": DeviceArrays(torch.device("cpu"))}
MIXED = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 9, "min_p": 0.01},
    {"temperature": 0.0, "top_k": 2},
]


@pytest.fixture(params=ARRAYS)
def arrays(request) -> Arrays:
    return ARRAYS[request.param]


def requests_of(params: list[dict]) -> list:
    return [
        make_request([3] * (4 + 3 * g), request_id=g, seed=11 * g, **each)
        for g, each in enumerate(params)
    ]


def noise_of(requests: list, padding: int = 0) -> dict[str, np.ndarray]:
    ends = np.array([len(request.tokens) for request in requests], dtype=np.int64)
    return noise_inputs(requests, ends, padding, LEVELS)


def inputs_of(guesser: Guesser, requests: list, padding: int = 0) -> dict[str, torch.Tensor]:
    given = noise_of(requests, padding) | guesser.tables()
    return {name: torch.from_numpy(array) for name, array in given.items()}


def children(guesser, arrays, logits, requests, trees, depth, padding=0):
    """Tokens and probabilities as numpy's, and the candidates."""
    inputs = inputs_of(guesser, requests, padding)
    found = guesser.children(arrays, logits.clone(), inputs, torch.tensor(trees), depth)
    return np.asarray(found.tokens_RW), np.asarray(found.probs_RW), found.found


def proposal_of(batch, topk, tokens, found) -> Proposal:
    """The guesses behind the root of each request's tree."""
    noise = noise_of([entry.request for entry in batch.entries])
    return Proposal(
        batch=batch, entries_G=list(range(len(tokens))), topk=topk,
        tokens_GC=tokens.astype(np.int32), probs_GC=np.ones(tokens.shape, dtype=np.float32),
        candidates_GN=np.zeros((len(tokens), 0), dtype=np.int32),
        index_GRK=np.asarray(found.index_RC)[:, None],
        probs_GRK=np.asarray(found.probs_RC)[:, None],
        ends_GRK=np.asarray(found.ends_RC)[:, None],
        uniforms_GL=noise["uniforms"], is_greedy_G=noise["is_greedy"] > 0,
    )  # fmt: skip


def taught(token_ids_D: torch.Tensor | None = None, topk: int = 4) -> Guesser:
    """A guesser whose tables are not what they begin with."""
    guesser, random = Guesser(topk, token_ids_D), np.random.default_rng(3)
    before = guesser.tables()
    for _ in range(20):
        requests = requests_of(MIXED)
        batch, entries = decode_batch(requests), range(len(requests))
        logits = torch.from_numpy(random.normal(0, 3, (len(MIXED), VOCAB)).astype(np.float32))
        tokens, _, found = children(guesser, Arrays(), logits, requests, entries, 0)
        guesser.remember(proposal_of(batch, topk, tokens, found))
        emitted = [int(random.choice(own)) for own in tokens]
        guesser.learn(batch, [EntryResult(token_ids=[token]) for token in emitted])
    assert not np.array_equal(guesser.tables()["weights"], before["weights"])
    assert not np.array_equal(guesser.tables()["ratios"], before["ratios"])
    return guesser


@pytest.mark.parametrize(
    ("params", "depth", "padding"),
    [(MIXED, 0, 3), (MIXED, 7, 0), (MIXED[:1], 1, 3), (MIXED[1:2], 3, 0)],
)
def test_a_device_guesses_as_the_host_does(params, depth, padding) -> None:
    ids = torch.arange(VOCAB) * 3
    guesser, requests, each = taught(ids), requests_of(params), 3
    rows = len(requests) * each
    logits = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(depth))
    trees = np.repeat(np.arange(len(requests) + padding), each)
    host = children(guesser, ARRAYS["host"], logits, requests, trees[:rows], depth)

    poisoned = torch.cat([logits, torch.full((padding * each, VOCAB), float("nan"))])
    device = children(guesser, ARRAYS["device"], poisoned, requests, trees, depth, padding)
    assert len(device[0]) == rows + padding * each
    np.testing.assert_allclose(device[1][:rows], host[1], rtol=1e-5, atol=1e-7)
    apart = np.diff(host[1], axis=1) < -1e-5  # those closer may change places
    same = device[0][:rows] == host[0]
    assert same[:, 1:-1][apart[:, :-1] & apart[:, 1:]].all()
    assert same.mean() > 0.95
    assert (host[0] % 3 == 0).all(), "the target's tokens"
    assert not device[1][rows:].any()


def test_broken_drafts_and_no_rows_guess_nothing(arrays) -> None:
    guesser, requests = taught(), requests_of(MIXED)
    logits = torch.full((len(requests), VOCAB), float("nan"))
    _, probs, _ = children(guesser, arrays, logits, requests, range(len(requests)), 0)
    assert not probs.any()
    none = np.zeros(0, dtype=np.int64)
    tokens, probs, _ = children(guesser, arrays, torch.zeros(0, VOCAB), requests, none, 1)
    assert tokens.shape == probs.shape == (0, 4)


def test_a_vocabulary_may_be_smaller_than_the_candidates_and_the_children(arrays) -> None:
    guesser, requests = taught(topk=5), requests_of(MIXED[:2])
    tokens, _, found = children(guesser, arrays, torch.zeros(2, 3), requests, [0, 1], 0)
    assert tokens.shape == (2, 4)
    assert found.index_RC.shape == (2, 4)
    assert found.probs_RC.sum(axis=1).tolist() == pytest.approx([1.0, 1.0])


def test_noise_is_that_of_the_position_guessed_at(arrays) -> None:
    """A flat draft has the token at the noise for its best."""
    guesser = Guesser(1, None)
    requests = [make_request([3] * length, seed=length, temperature=1.0) for length in (4, 9)]
    for depth in (0, 2):
        flat = torch.zeros(2, VOCAB)
        tokens, _, _ = children(guesser, arrays, flat, requests, [0, 1], depth)
        noise = reference.noise(np.array([4, 9], dtype=np.uint64), np.array([4 + depth, 9 + depth]))
        assert tokens[:, 0].tolist() == (noise * VOCAB).astype(int).tolist()
