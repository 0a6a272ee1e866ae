"""The sequences of a ring that are trained on or held out, and the source of cached prefixes'
features."""

from __future__ import annotations

import pytest
import torch

from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.draft_training.config import CoTrainingConfig
from spec_workers.draft_training.recent_rollouts import RecentRollouts
from spec_workers.features.feature_ring import FeatureRing

HIDDEN = 4


@pytest.fixture
def ring():
    ring = FeatureRing(256 << 10, AuxHiddenStates(layers=(1,), final=True), HIDDEN, torch.float32)
    yield ring
    ring.close()


def features(tokens: list[int], version: int = 0) -> torch.Tensor:
    """Features like a target's: a row is a function of the tokens up to its own, and of the
    weights."""
    prefix_sums = torch.tensor(tokens, dtype=torch.float32).cumsum(0)
    return (prefix_sums + 1000 * version)[:, None].expand(-1, 2 * HIDDEN)


def write(ring, tokens: list[int], prompt_len: int, first: int = 0, version: int = 0) -> None:
    rows = features(tokens, version)[first:-1]
    ring.write(tokens, [rows], first_position=first, prompt_len=prompt_len, weight_version=version)


def rollouts_of(ring, **config) -> RecentRollouts:
    return RecentRollouts(ring.reader(), CoTrainingConfig(**config))


def all_of(rollouts: RecentRollouts) -> list:
    return [*rollouts.training, *rollouts.held_out]


def assert_features_go_with_tokens(sequence, tokens: list[int]) -> None:
    first, count = sequence.first_position, len(sequence.features_NF)
    assert sequence.tokens.token_ids_L.tolist() == tokens[first : first + count + 1]
    assert torch.equal(sequence.features_NF, features(tokens)[first : first + count])


def test_a_sequence_becomes_one_to_train_on(ring):
    tokens = list(range(10, 30))
    write(ring, tokens, prompt_len=8)
    rollouts = rollouts_of(ring)
    assert rollouts.refresh() == 1
    (sequence,) = all_of(rollouts)
    assert len(sequence.features_NF) == 19
    assert sequence.tokens.first_root == 7
    assert_features_go_with_tokens(sequence, tokens)
    assert rollouts.refresh() == 0


@pytest.mark.parametrize("order", ["donor first", "donor last"])
def test_a_cached_prefix_gets_the_features_of_whoever_computed_it(ring, order):
    prompt = list(range(10, 30))
    computed, cached = [*prompt, 1, 2, 3, 4], [*prompt, 5, 6, 7, 8]
    writes = [(computed, 0), (cached, 19)]
    for tokens, first in writes if order == "donor first" else reversed(writes):
        write(ring, tokens, prompt_len=20, first=first)
    rollouts = rollouts_of(ring)
    rollouts.refresh()
    for sequence, tokens in zip(
        sorted(all_of(rollouts), key=lambda each: int(each.tokens.token_ids_L[-1])),
        (computed, cached),
        strict=True,
    ):
        assert sequence.first_position == 0
        assert sequence.tokens.first_root == 19
        assert_features_go_with_tokens(sequence, tokens)


@pytest.mark.parametrize("reason", ["version", "tokens", "too short", "nobody"])
def test_without_such_a_one_a_sequence_begins_where_its_features_do(ring, reason):
    prompt = list(range(10, 30))
    cached = [*prompt, 5, 6, 7, 8]
    if reason == "version":
        write(ring, [*prompt, 1, 2, 3], prompt_len=20, version=1)
    elif reason == "tokens":
        write(ring, [9, *prompt[1:], 1, 2, 3], prompt_len=20)
    elif reason == "too short":
        write(ring, prompt[:12], prompt_len=12)
    write(ring, cached, prompt_len=20, first=19)
    rollouts = rollouts_of(ring)
    rollouts.refresh()
    sequence = next(each for each in all_of(rollouts) if each.tokens.token_ids_L[-1] == 8)
    assert sequence.first_position == 19
    assert sequence.tokens.first_root == 0
    assert_features_go_with_tokens(sequence, cached)


def test_a_long_sequence_is_cut_and_nothing_is_lost(ring):
    tokens = list(range(100))
    write(ring, tokens, prompt_len=35)
    rollouts = rollouts_of(ring, max_len=30)
    rollouts.refresh()
    stretches = all_of(rollouts)
    assert all(len(each.tokens.token_ids_L) <= 30 for each in stretches)
    for each in stretches:
        assert_features_go_with_tokens(each, tokens)
    guessed = set()
    for each in stretches:
        roots = range(each.tokens.first_root, len(each.tokens.token_ids_L) - 2)
        guessed |= {each.first_position + root + 2 for root in roots}
    # Of the tokens after the prompt's next, a stretch's first cannot be guessed from within it.
    assert guessed == set(range(36, 100)) - {88, 59}


def test_what_has_nothing_to_guess_is_left_out(ring):
    write(ring, [1, 2, 3, 4, 5], prompt_len=4)  # one token came; no row both reads and is judged
    write(ring, [8, 2, 3], prompt_len=1, first=1)
    rollouts = rollouts_of(ring)
    assert rollouts.refresh() == 2
    assert all_of(rollouts) == []


def test_one_prompt_in_so_many_is_held_out_whole(ring):
    rollouts = rollouts_of(ring, held_out_every=3, max_held_out=1000)
    for prompt in range(40):
        for sample in range(3):
            write(ring, [prompt, prompt + 1, 7, sample, 9, 4], prompt_len=3)
    rollouts.refresh()
    kept = [{int(each.tokens.token_ids_L[0]) for each in those}
            for those in (rollouts.training, rollouts.held_out)]  # fmt: skip
    assert kept[0].isdisjoint(kept[1])
    assert len(kept[0] | kept[1]) == 40
    assert 5 < len(kept[1]) < 25
    again = rollouts_of(ring, held_out_every=3, max_held_out=1000)  # as after a restart
    again.refresh()
    assert kept[1] >= {int(each.tokens.token_ids_L[0]) for each in again.held_out}


def test_the_newest_are_kept(ring):
    rollouts = rollouts_of(ring, max_bytes=2000, max_held_out=2, held_out_every=2)
    for number in range(60):
        write(ring, [number, 1, 2, 3, 4, 5, 6, 7], prompt_len=2, version=number)
        rollouts.refresh()
    assert 1000 < rollouts.num_bytes <= 2000
    assert sum(each.features_NF.nbytes for each in rollouts.training) >= 800
    assert min(int(each.tokens.token_ids_L[0]) for each in rollouts.training) > 40
    assert len(rollouts.held_out) == 2
    assert rollouts.newest_version == 59
    assert rollouts.num_taken == 60


def test_held_out_stretches_and_donors_leave_most_of_the_memory_to_training(ring):
    """However many may be held out, and however long the sequences that prefixes come from."""
    rollouts = rollouts_of(ring, max_bytes=40_000, max_held_out=1000, held_out_every=2)
    for number in range(200):
        write(ring, [number, *range(40)], prompt_len=2)
        rollouts.refresh()
        assert rollouts.num_bytes <= 40_000
    training, held_out = (sum(each.features_NF.nbytes for each in those)
                          for those in (rollouts.training, rollouts.held_out))  # fmt: skip
    assert 8_000 < held_out <= 10_000
    assert training > 18_000
    assert len(rollouts.held_out) < 10
