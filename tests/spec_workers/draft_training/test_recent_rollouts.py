"""The sequences of a ring that are trained on or held out, and the features of cached prefixes."""

from __future__ import annotations

import pytest
import torch

from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.draft_training.config import CoTrainingConfig
from spec_workers.draft_training.recent_rollouts import RecentRollouts
from spec_workers.features.feature_ring import FeatureRing

HIDDEN = 4
PROMPT = list(range(10, 30))
CACHED = [*PROMPT, 5, 6, 7, 8]


@pytest.fixture
def ring():
    return FeatureRing(256 << 10, AuxHiddenStates(layers=(1,), final=True), HIDDEN, torch.float32)


def features(tokens: list[int], version: int = 0) -> torch.Tensor:
    """Features like a target's: a row is a function of the tokens up to its own and the weights."""
    prefix_sums = torch.tensor(tokens, dtype=torch.float32).cumsum(0)
    return (prefix_sums + 1000 * version)[:, None].expand(-1, 2 * HIDDEN)


def write(ring, tokens: list[int], prompt_len: int, first: int = 0, version: int = 0) -> None:
    rows = features(tokens, version)[first:-1]
    ring.write(tokens, [rows], first_position=first, prompt_len=prompt_len, weight_version=version)


def rollouts_of(ring, **config) -> RecentRollouts:
    rollouts = RecentRollouts(ring, CoTrainingConfig(**config))
    rollouts.refresh()
    return rollouts


def by_last_token(rollouts: RecentRollouts) -> dict:
    every = [*rollouts.training, *rollouts.held_out]
    return {int(each.tokens.token_ids_L[-1]): each for each in every}


def assert_features_go_with_tokens(sequence, tokens: list[int]) -> None:
    first, count = sequence.first_position, len(sequence.features_NF)
    assert sequence.tokens.token_ids_L.tolist() == tokens[first : first + count + 1]
    assert torch.equal(sequence.features_NF, features(tokens)[first : first + count])


@pytest.mark.parametrize("order", [1, -1])
def test_a_cached_prefix_gets_the_features_of_the_sequence_that_computed_it(ring, order):
    computed = [*PROMPT, 1, 2, 3, 4]
    for tokens, first in [(computed, 0), (CACHED, 19)][::order]:
        write(ring, tokens, prompt_len=20, first=first)
    rollouts = rollouts_of(ring)
    found = by_last_token(rollouts)
    for tokens in (computed, CACHED):
        sequence = found[tokens[-1]]
        assert sequence.first_position == 0
        assert sequence.tokens.first_root == 19
        assert len(sequence.features_NF) == 23
        assert_features_go_with_tokens(sequence, tokens)
    assert rollouts.num_taken == 2
    assert rollouts.refresh() == 0


@pytest.mark.parametrize(
    ("tokens", "version"),
    [([*PROMPT, 1, 2, 3], 1), ([9, *PROMPT[1:], 1, 2, 3], 0), (PROMPT[:12], 0), ([], 0)],
    ids=["version", "tokens", "too short", "nobody"],
)
def test_without_such_a_sequence_one_begins_where_its_features_do(ring, tokens, version):
    if tokens:
        write(ring, tokens, prompt_len=min(len(tokens), 20), version=version)
    write(ring, CACHED, prompt_len=20, first=19)
    sequence = by_last_token(rollouts_of(ring))[8]
    assert sequence.first_position == 19
    assert sequence.tokens.first_root == 0
    assert_features_go_with_tokens(sequence, CACHED)


def test_a_long_sequence_is_cut_and_nothing_is_lost(ring):
    tokens = list(range(100))
    write(ring, tokens, prompt_len=35)
    guessed = set()
    for part in by_last_token(rollouts_of(ring, max_len=30)).values():
        assert len(part.tokens.token_ids_L) <= 30
        assert_features_go_with_tokens(part, tokens)
        roots = range(part.tokens.first_root, len(part.tokens.token_ids_L) - 2)
        guessed |= {part.first_position + root + 2 for root in roots}
    # Of the tokens after the prompt's next, a part's first cannot be guessed from within it.
    assert guessed == set(range(36, 100)) - {88, 59}


def test_sequences_without_anything_to_guess_are_left_out(ring):
    write(ring, [1, 2, 3, 4, 5], prompt_len=4)  # one token came; no row both reads and is judged
    write(ring, [8, 2, 3], prompt_len=1, first=1)
    rollouts = rollouts_of(ring)
    assert rollouts.num_taken == 2
    assert by_last_token(rollouts) == {}


def test_one_prompt_in_so_many_is_held_out_whole(ring):
    for prompt in range(40):
        for sample in range(3):
            write(ring, [prompt, prompt + 1, 7, sample, 9, 4], prompt_len=3)

    def prompts() -> list[set[int]]:
        rollouts = rollouts_of(ring, held_out_every=3, max_held_out=1000)
        return [
            {int(each.tokens.token_ids_L[0]) for each in sequences}
            for sequences in (rollouts.training, rollouts.held_out)
        ]

    training, held_out = prompts()
    assert training.isdisjoint(held_out)
    assert len(training | held_out) == 40
    assert 5 < len(held_out) < 25
    assert prompts() == [training, held_out], "also after a restart"


def test_the_newest_are_kept(ring):
    rollouts = rollouts_of(ring, max_bytes=2000, max_held_out=1000, held_out_every=2)
    for number in range(60):
        write(ring, [number, 1, 2, 3, 4, 5, 6, 7], prompt_len=2, version=number)
        rollouts.refresh()
    assert 800 <= sum(each.features_NF.nbytes for each in rollouts.training) <= 2000
    assert min(int(each.tokens.token_ids_L[0]) for each in rollouts.training) > 40
    held_out = sum(each.features_NF.nbytes for each in rollouts.held_out)
    assert 200 < held_out <= 500, "a fourth, and as much for donors"
    assert len(rollouts_of(ring, max_held_out=2, held_out_every=2).held_out) == 2
    assert rollouts.newest_version == 59
