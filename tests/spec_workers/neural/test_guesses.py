"""Guesses behind each node, on the host's arrays and on a device's, and learning from a step."""

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


def results(*emitted: list[int]) -> list[EntryResult]:
    return [EntryResult(token_ids=tokens) for tokens in emitted]


def children(guesser, arrays, logits, requests, trees, depth, padding=0):
    """Tokens and probabilities as numpy's, and the candidates."""
    inputs = inputs_of(guesser, requests, padding)
    found = guesser.children(arrays, logits.clone(), inputs, torch.tensor(trees), depth)
    return np.asarray(found.tokens_RW), np.asarray(found.probs_RW), found.found


def proposal_of(batch, entries, topk, levels, candidates) -> Proposal:
    """``levels``: what was guessed at each, of as many rows of each tree."""
    count = len(entries)
    noise = noise_of([batch.entries[b].request for b in entries])

    def by_tree(rows: list) -> np.ndarray:
        return np.concatenate([np.asarray(each).reshape(count, -1, 33) for each in rows], axis=1)

    tokens = np.concatenate([each[0].reshape(count, -1) for each in levels], axis=1)
    return Proposal(
        batch=batch, entries_G=entries, topk=topk, tokens_GC=tokens.astype(np.int32),
        probs_GC=np.ones(tokens.shape, dtype=np.float32),
        candidates_GN=np.array(candidates, dtype=np.int32),
        index_GRK=by_tree([each[2].index_RC for each in levels]),
        probs_GRK=by_tree([each[2].probs_RC for each in levels]),
        ends_GRK=by_tree([each[2].ends_RC for each in levels]), uniforms_GL=noise["uniforms"],
        is_greedy_G=noise["is_greedy"] > 0 if "is_greedy" in noise else None,
    )  # fmt: skip


def nothing_of(batch) -> Proposal:
    """A proposal of no trees."""
    arrays = ("tokens_GC", "probs_GC", "candidates_GN", "index_GRK", "probs_GRK", "ends_GRK")
    none = dict.fromkeys([*arrays, "uniforms_GL"], np.zeros((0, 0)))
    return Proposal(batch=batch, entries_G=[], topk=2, is_greedy_G=None, **none)


def taught(token_ids_D: torch.Tensor | None = None, topk: int = 4) -> Guesser:
    """A guesser whose tables are not what they begin with."""
    guesser, random = Guesser(topk, token_ids_D), np.random.default_rng(3)
    before = guesser.tables()
    for _ in range(20):
        requests = requests_of(MIXED)
        batch, entries = decode_batch(requests), list(range(len(requests)))
        logits = torch.from_numpy(random.normal(0, 3, (len(MIXED), VOCAB)).astype(np.float32))
        level = children(guesser, Arrays(), logits, requests, entries, 0)
        nothing_run = np.zeros((len(MIXED), 0))
        guesser.remember(proposal_of(batch, entries, topk, [level], nothing_run))
        emitted = [int(random.choice(own)) for own in level[0]]
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


def likeliest(pairs: list[list[int]]) -> torch.Tensor:
    """Logits with two likely tokens in each row, the first the likelier."""
    logits = torch.zeros(len(pairs), VOCAB)
    for row, (first, second) in enumerate(pairs):
        logits[row, first], logits[row, second] = 4.0, 3.5
    return logits


@pytest.fixture
def learned(monkeypatch, arrays):
    """A guesser with two trees of two levels, and the cases its mixture learns from. Both children
    of the first root were run, and of the second root the second child alone."""
    guesser = Guesser(2, None)
    cases: list[tuple] = []
    monkeypatch.setattr(guesser._mixture, "learn", lambda *rows: cases.append(rows))
    requests = [make_request([3] * 4, request_id=b, temperature=0.0) for b in range(3)]
    batch, entries = decode_batch(requests), [0, 2]
    own = [requests[b] for b in entries]
    below = likeliest([[1, 2], [3, 4], [9, 10], [10, 11]])
    levels = [
        children(guesser, arrays, likeliest([[5, 6], [7, 8]]), own, [0, 1], 0),
        children(guesser, arrays, below, own, [0, 0, 1, 1], 1),
    ]
    assert levels[0][0].tolist() == [[5, 6], [7, 8]]
    guesser.remember(proposal_of(batch, entries, 2, levels, [[0, 1], [1, -1]]))
    return guesser, batch, cases


def test_tokens_are_followed_down_the_nodes_that_were_run(learned) -> None:
    guesser, batch, cases = learned
    guesser.learn(batch, results([6, 3, 1], [5, 1], [8, 9, 9]))
    ((contexts, components, came_true),) = cases
    assert len(contexts) == 4  # 6 and 3 of the first tree, 8 and 9 of the second
    assert (came_true.sum(axis=1) == 1).all()
    first_of = components[:, :, 0][came_true]
    highest = components[:, :, 0].max(axis=1)
    assert (first_of == highest).tolist() == [False, True, False, True]
    assert contexts[0] == contexts[2]
    assert contexts[1] == contexts[3] != contexts[0]  # one level further down


def test_each_step_in_flight_teaches_by_its_own_tokens_once(learned) -> None:
    guesser, batch, cases = learned
    guesser.learn(decode_batch([make_request()]), results([6]))
    assert not cases
    guesser.remember(nothing_of(decode_batch([make_request()])))
    for _ in range(2):
        guesser.learn(batch, results([6], [5], [7]))
        assert len(cases) == 1
    guesser.remember(nothing_of(batch))
    for _ in range(2):  # as many as may be in flight
        guesser.remember(nothing_of(decode_batch([make_request()])))
    guesser.learn(batch, results([6], [5], [7]))
    assert len(cases) == 1
