"""Rows are recognised by what they hold."""

from __future__ import annotations

import numpy as np
import pytest

from spec_workers.vllm.rows import RecognisedRows, RequestRows

MAX_ROWS, MAX_LEN = 6, 200


def update(rows: RequestRows, *held: tuple[list[int], int]) -> RecognisedRows:
    """A call whose rows hold these tokens, so many of them sampled just now."""
    token_ids_RL = np.full((MAX_ROWS, MAX_LEN), 7, dtype=np.int32)  # left by others
    for row, (tokens, _) in enumerate(held):
        token_ids_RL[row, : len(tokens)] = tokens
    counts_B = np.array([count for _, count in held], dtype=np.int64)
    return rows.update(counts_B, np.array([len(t) for t, _ in held], np.int64), token_ids_RL)


@pytest.fixture
def rows() -> RequestRows:
    return RequestRows(MAX_ROWS, MAX_LEN, max_away=2)


def test_a_request_of_the_same_length_in_the_same_row_is_another(rows: RequestRows) -> None:
    (first,) = update(rows, ([1, 2, 3], 1)).ids_B.tolist()
    other = update(rows, ([1, 2, 4, 5], 1))
    assert other.is_new_B.all()
    assert other.ids_B.tolist() != [first]
    prompt = list(range(100, 160))  # longer than the part that is compared first
    begun = update(rows, ([1, *prompt, 5], 1), ([2, *prompt, 5], 1))
    assert begun.ids_B[0] != begun.ids_B[1]
    swapped = update(rows, ([2, *prompt, 5], 0))
    assert swapped.tokens_N.size == 0


def test_the_next_turn_of_a_chat_continues_its_request(rows: RequestRows) -> None:
    (first,) = update(rows, ([1, 2, 3], 1)).ids_B.tolist()
    update(rows, ([9, 9], 1))
    turn = update(rows, ([9, 9, 1], 1), ([1, 2, 3, 50, 51, 52], 1))
    assert turn.ids_B[1] == first
    assert not turn.is_new_B[1]
    assert turn.tokens_N.tolist() == [1, 50, 51, 52]


def test_requests_that_are_away_longest_are_forgotten(rows: RequestRows) -> None:
    ids = [int(update(rows, ([10 + k, 1], 1)).ids_B[0]) for k in range(3)]
    assert update(rows, ([20, 1], 1)).forgotten == [ids[0]]
    again = update(rows, ([10, 1, 1], 1), ([11, 1, 1], 1))
    assert again.is_new_B.tolist() == [True, False]
    assert again.ids_B.tolist() == [4, ids[1]]


def test_random_batches_against_requests_that_are_known() -> None:
    """Requests begin, grow, move, leave and come back at random; each is always found again."""
    rng = np.random.default_rng(3)
    rows = RequestRows(MAX_ROWS, MAX_LEN, max_away=1000)
    before: list[int] = []
    tokens_of: dict[int, list[int]] = {}  # by the request's true name
    number_of: dict[int, int] = {}
    for _ in range(200):
        names = [name for name, tokens in tokens_of.items() if len(tokens) < MAX_LEN - 6]
        held = rng.permutation(names)[: rng.integers(0, MAX_ROWS)].tolist() if names else []
        if len(held) < MAX_ROWS:
            name = len(tokens_of)
            tokens_of[name] = [1, 2, *rng.integers(0, 3, rng.integers(1, 9)).tolist(), 100 + name]
            held.append(name)
        call = []
        for name in held:
            new = rng.integers(0, 3, rng.integers(0, 5)).tolist()
            tokens_of[name] += new
            call.append((tokens_of[name], len(new)))
        seen = update(rows, *call)
        for b, name in enumerate(held):
            assert seen.is_new_B[b] == (name not in number_of)
            assert number_of.setdefault(name, int(seen.ids_B[b])) == seen.ids_B[b]
            new = seen.tokens_N[seen.offsets_B1[b] : seen.offsets_B1[b + 1]].tolist()
            assert new == tokens_of[name][seen.known_B[b] :]
            assert len(new) == call[b][1]
            assert seen.stayed_B[b] == (before[b : b + 1] == [name])
        before = held
