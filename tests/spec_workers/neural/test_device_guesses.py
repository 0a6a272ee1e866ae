"""Guesses made on a device are the reference's, and what is learned from them is the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.types import EntryResult
from spec_workers.neural.device_guesses import DeviceGuesser, noise_inputs
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.read_proposal import ReadProposal
from tests.helpers.requests import decode_batch, make_request

VOCAB = 90
CPU = torch.device("cpu")
MIXED = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 9, "min_p": 0.01},
    {"temperature": 0.0, "top_k": 2},
]


def requests_of(params: list[dict]) -> list:
    return [
        make_request([3] * (4 + 3 * g), request_id=g, seed=11 * g, **each)
        for g, each in enumerate(params)
    ]


def taught(token_ids_D: torch.Tensor | None = None, topk: int = 4) -> Guesser:
    """A guesser that learned something: its tables are not what they begin with."""
    guesser, random = Guesser(topk, token_ids_D), np.random.default_rng(3)
    for _ in range(20):
        batch = decode_batch(requests_of(MIXED))
        guesses = guesser.begin(batch, list(range(len(MIXED))))
        logits = torch.from_numpy(random.normal(0, 3, (len(MIXED), VOCAB)).astype(np.float32))
        none = np.zeros(len(MIXED), dtype=np.int64)
        tokens, _ = guesser.children(guesses, logits, np.arange(len(MIXED)), none)
        emitted = [int(random.choice(own)) for own in tokens]
        guesser.learn(batch, [EntryResult(token_ids=[token]) for token in emitted])
    return guesser


def device_inputs(guesser: Guesser, requests: list, padding: int) -> dict[str, torch.Tensor]:
    ends = np.array([len(request.tokens) for request in requests], dtype=np.int64)
    arrays = noise_inputs(requests, ends, padding) | guesser.tables()
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("depth", [0, 1, 3, 7])
@pytest.mark.parametrize("params", [MIXED, MIXED[:1], MIXED[:2]], ids=["mixed", "one", "plain"])
@pytest.mark.parametrize("padding", [0, 3])
def test_children_are_the_references(params, depth, padding) -> None:
    ids = torch.arange(VOCAB) * 3
    guesser, requests, each = taught(ids), requests_of(params), 3
    rows = len(requests) * each
    logits = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(depth))
    trees = np.repeat(np.arange(len(requests)), each)
    guesses = guesser.begin(decode_batch(requests), list(range(len(requests))))
    wanted = guesser.children(guesses, logits.clone(), trees, np.full(rows, depth))

    poison = torch.full((padding * each, VOCAB), float("nan"))
    inputs = device_inputs(guesser, requests, padding)
    found = DeviceGuesser(4, ids, CPU).children(torch.cat([logits, poison]), inputs, depth)
    assert len(found.tokens_RW) == rows + padding * each
    np.testing.assert_allclose(found.estimates_RW[:rows], wanted[1], rtol=1e-5, atol=1e-7)
    apart = np.diff(wanted[1], axis=1) < -1e-5  # those closer may change places
    same = found.tokens_RW[:rows].numpy() == wanted[0]
    assert same[:, 1:-1][apart[:, :-1] & apart[:, 1:]].all()
    assert same.mean() > 0.95
    assert not found.estimates_RW[rows:].any()


def test_a_broken_draft_thinks_of_nothing() -> None:
    guesser, requests = taught(), requests_of(MIXED)
    logits = torch.full((len(requests), VOCAB), float("nan"))
    found = DeviceGuesser(4, None, CPU).children(logits, device_inputs(guesser, requests, 0), 0)
    assert not found.estimates_RW.any()


def test_a_vocabulary_of_less_than_the_candidates_and_of_less_than_the_children() -> None:
    guesser, requests = taught(), requests_of(MIXED[:2])
    found = DeviceGuesser(5, None, CPU).children(
        torch.zeros(2, 3), device_inputs(guesser, requests, 0), 0
    )
    assert found.tokens_RW.shape == (2, 4)
    assert found.index_RC.shape == (2, 4)


def test_what_came_is_learned_as_if_it_had_been_guessed_on_the_host(monkeypatch) -> None:
    """Two trees of two levels, followed down the nodes that were run."""
    guesser, told = Guesser(2, None), []
    monkeypatch.setattr(guesser._mixture, "learn", lambda *rows: told.append(rows))
    requests = requests_of([{"temperature": 0.9}, {"temperature": 0.0}, {"temperature": 0.6}])
    batch, entries = decode_batch(requests), [0, 2]
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    device = DeviceGuesser(2, None, CPU)
    inputs = device_inputs(guesser, [requests[b] for b in entries], 0)
    levels = [
        device.children(logits[:, :1].reshape(-1, VOCAB).clone(), inputs, 0),
        device.children(logits[:, 1:].reshape(-1, VOCAB).clone(), inputs, 1),
    ]
    tokens = torch.cat([each.tokens_RW.view(2, -1) for each in levels], dim=1)

    def by_tree(name: str) -> np.ndarray:
        return torch.cat([getattr(each, name).view(2, -1, 33) for each in levels], dim=1).numpy()

    # Both children of the first root were run, and of the second root the second child alone.
    guesser.remember(
        ReadProposal(
            batch=batch, entries_G=entries, guesser=guesser, topk=2,
            tokens_GC=tokens.int().numpy(), probs_GC=np.ones((2, 6), dtype=np.float32),
            candidates_GN=np.array([[0, 1], [1, -1]], dtype=np.int32),
            index_GRK=by_tree("index_RC"), probs_GRK=by_tree("probs_RC"),
            ends_GRK=by_tree("ends_RC"),
        )
    )  # fmt: skip
    first, second = tokens[0].tolist(), tokens[1].tolist()
    emitted = [[first[1], first[5], 3], [1], [second[0], second[2]]]
    guesser.learn(batch, [EntryResult(token_ids=own) for own in emitted])
    ((contexts, components, came_true),) = told

    reference = Guesser(2, None)
    guesses = reference.begin(batch, entries)
    rows = torch.stack([logits[0, 0], logits[0, 2], logits[1, 0]])
    depths = np.array([0, 1, 0])
    reference.children(guesses, rows.clone(), np.array([0, 0, 1]), depths)
    (wanted,) = guesses.guessed
    assert contexts.tolist() == wanted.contexts_R.tolist()
    assert np.array_equal(components, wanted.components_RCK)
    tokens_R = np.array([first[1], first[5], second[0]])
    expected = (wanted.tokens_RC == tokens_R[:, None]) & components.any(axis=2)
    assert np.array_equal(came_true, expected)
    assert came_true.any(axis=1).all()
