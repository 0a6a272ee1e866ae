"""The ring of features: sequences come out as they went in, whole, whoever reads them and when."""

from __future__ import annotations

import random

import pytest
import torch

from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.weights.segment import OwnedSegment
from spec_workers.features.feature_ring import FeatureReader, FeatureRing, FeatureSequence

FEATURES = AuxHiddenStates(layers=(0, 2), final=True)
HIDDEN = 8


@pytest.fixture
def ring():
    ring = FeatureRing(64 << 10, FEATURES, HIDDEN, torch.float32)
    yield ring
    ring.close()


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


def taken(reader: FeatureReader) -> list[int]:
    return [check(each) for each in reader.take()]


def test_a_sequence_comes_out_as_it_went_in(ring):
    rows_NF = torch.randn(5, 24)
    ring.write(
        [9, 8, 7, 6, 5, 4, 3, 2], rows_NF.split([1, 4]), first_position=2, prompt_len=4,
        weight_version=11,
    )  # fmt: skip
    (sequence,) = ring.reader().take()
    assert sequence.token_ids_L.tolist() == [9, 8, 7, 6, 5, 4, 3, 2]
    assert torch.equal(sequence.features_NF, rows_NF)
    assert (sequence.first_position, sequence.prompt_len) == (2, 4)
    assert (sequence.weight_version, sequence.number) == (11, 0)


def test_a_reader_takes_each_once_and_in_order(ring):
    reader = ring.reader()
    assert reader.take() == []
    for number in range(3):
        write(ring, number, 4)
    assert ring.times_taken == 1
    assert taken(reader) == [0, 1, 2]
    write(ring, 3, 7)
    assert taken(reader) == [3]
    assert reader.take() == []
    assert ring.times_taken == 4
    assert reader.num_missed == 0


@pytest.mark.parametrize("seed", range(2))
def test_the_oldest_are_overwritten_whole(ring, seed):
    chance, reader, got = random.Random(seed), ring.reader(), []
    longest = ring.max_rows(100)
    for number in range(300):
        write(ring, number, chance.randint(2, min(longest, 60)), chance.randint(0, 9))
        if chance.random() < 0.06:
            got += taken(reader)
    got += taken(reader)
    assert got == sorted(set(got))
    assert len(got) < 300
    assert reader.num_missed == 300 - len(got)
    assert got[-1] == 299
    # A reader that comes late finds about as much as the ring holds.
    late = ring.reader().take()
    kept = sum(each.features_NF.nbytes for each in late)
    assert kept > ring.capacity * (1 - 2 / 8) - len(late) * 256
    assert [check(each) for each in late] == list(range(300 - len(late), 300))


def test_a_ring_is_opened_by_name():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ring = FeatureRing(64 << 10, FEATURES, HIDDEN, dtype)
        reader = FeatureReader.open(ring.name)
        assert (reader.features, reader.dtype, reader.num_columns) == (FEATURES, dtype, 24)
        write(ring, 0, 5)
        (sequence,) = reader.take()
        assert sequence.features_NF.dtype is dtype
        check(sequence)
        ring.close()
        assert reader.take() == []  # what is mapped stays
        with pytest.raises(InvalidInputError, match="cannot be opened"):
            FeatureReader.open(ring.name)


def test_other_segments_and_small_sizes_are_refused():
    segment = OwnedSegment(1 << 16)
    with pytest.raises(InvalidInputError, match="not a feature ring"):
        FeatureReader.open(segment.name)
    with pytest.raises(InvalidInputError, match="must be a segment's name"):
        FeatureReader.open("../etc/passwd")
    with pytest.raises(InvalidInputError, match=r"spec\.feature_ring_bytes"):
        FeatureRing(1000, FEATURES, 576, torch.float32, field="spec.feature_ring_bytes")


def test_the_longest_sequence_fits(ring):
    for number in range(20):
        write(ring, number, ring.max_rows(500), extra=500 - ring.max_rows(500))
    assert len(ring.reader().take()) >= 7
