"""The ring of features: sequences come out as they went in, whole and in order."""

from __future__ import annotations

import random

import pytest
import torch

from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.features.feature_ring import FeatureRing, FeatureSequence

FEATURES = AuxHiddenStates(layers=(0, 2), final=True)
HIDDEN = 8


@pytest.fixture
def ring():
    return FeatureRing(64 << 10, FEATURES, HIDDEN, torch.float32)


def write(ring: FeatureRing, number: int, num_rows: int, extra: int = 1) -> None:
    """A sequence every value of which is its number."""
    rows_NF = torch.full((num_rows, ring.num_columns), float(number), dtype=ring.dtype)
    ring.write(
        [number] * (num_rows + extra), rows_NF.split(50), first_position=0, prompt_len=2,
        weight_version=number,
    )  # fmt: skip


def check(sequence: FeatureSequence) -> int:
    """Check that all of it is one sequence. Returns its number."""
    (number,) = {sequence.number, sequence.weight_version, *sequence.token_ids_L.tolist()}
    assert (sequence.features_NF == number).all()
    assert sequence.prompt_len == 2
    assert len(sequence.token_ids_L) > len(sequence.features_NF) - 1
    return number


def test_a_sequence_comes_out_as_it_went_in(ring):
    rows_NF = torch.randn(5, 24)
    ring.write(
        [9, 8, 7, 6, 5, 4, 3, 2], rows_NF.split([1, 4]), first_position=2, prompt_len=4,
        weight_version=11,
    )  # fmt: skip
    (sequence,) = ring.read(0)
    assert sequence.token_ids_L.tolist() == [9, 8, 7, 6, 5, 4, 3, 2]
    assert torch.equal(sequence.features_NF, rows_NF)
    assert (sequence.first_position, sequence.prompt_len) == (2, 4)
    assert (sequence.weight_version, sequence.number) == (11, 0)
    assert ring.read(1) == []
    assert ring.times_read == 2


@pytest.mark.parametrize("seed", range(2))
def test_the_oldest_make_room(ring, seed):
    chance, rows = random.Random(seed), []
    longest = ring.max_rows(100)
    for number in range(300):
        rows.append(chance.randint(2, min(longest, 60)))
        write(ring, number, rows[-1], chance.randint(0, 9))
        held = [check(each) for each in ring.read(0)]
        assert held == list(range(held[0], number + 1)), "what is held is the newest"
        num_bytes = sum(rows[each] for each in held) * ring.row_bytes
        assert num_bytes <= ring.capacity
        assert num_bytes > ring.capacity * (1 - 2 / 8) - len(held) * 256 or held[0] == 0
        first = chance.randint(0, number)
        assert [each.number for each in ring.read(first)] == [n for n in held if n >= first]
    assert held[0] > 0


def test_dtypes_and_small_sizes():
    ring = FeatureRing(64 << 10, FEATURES, HIDDEN, torch.bfloat16)
    write(ring, 0, 5)
    (sequence,) = ring.read(0)
    assert sequence.features_NF.dtype is torch.bfloat16
    check(sequence)
    with pytest.raises(InvalidInputError, match=r"spec\.feature_ring_bytes"):
        FeatureRing(1000, FEATURES, 576, torch.float32, field="spec.feature_ring_bytes")


def test_the_longest_sequence_fits(ring):
    for number in range(20):
        write(ring, number, ring.max_rows(500), extra=500 - ring.max_rows(500))
    assert len(ring.read(0)) >= 7
