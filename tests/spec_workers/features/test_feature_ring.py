"""The ring of features: what comes out is what went in, whole, whoever reads it and whenever."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.weights.segment import OwnedSegment
from spec_workers.features.feature_ring import FeatureReader, FeatureRing, FeatureSequence
from tests.helpers.hang import HANG_SECONDS

FEATURES = AuxHiddenStates(layers=(0, 2), final=True)
HIDDEN = 8
ROOT = Path(__file__).parents[3]


@pytest.fixture
def ring():
    ring = FeatureRing(64 << 10, FEATURES, HIDDEN, torch.float32)
    yield ring
    ring.close()


def write(ring: FeatureRing, number: int, num_rows: int, extra: int = 1, first: int = 0) -> None:
    """A sequence every value of which says which one it is."""
    rows_NF = torch.full((num_rows, ring.num_columns), float(number), dtype=ring.dtype)
    ring.write(
        [number] * (first + num_rows + extra),
        rows_NF.split(50),
        first_position=first,
        prompt_len=2,
        weight_version=number,
    )


def check(sequence: FeatureSequence) -> int:
    """That all of it is of one writing; which."""
    (number,) = {sequence.number, sequence.weight_version, *sequence.token_ids_L.tolist()}
    assert (sequence.features_NF == number).all()
    assert sequence.prompt_len == 2
    assert len(sequence.token_ids_L) > sequence.first_position + len(sequence.features_NF) - 1
    return number


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
    assert [check(each) for each in reader.take()] == [0, 1, 2]
    write(ring, 3, 7)
    assert [check(each) for each in reader.take()] == [3]
    assert reader.take() == []
    assert ring.times_taken == 4
    assert reader.num_missed == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_oldest_are_overwritten_whole(ring, seed):
    chance, reader, got = random.Random(seed), ring.reader(), []
    longest = ring.max_rows(100)
    for number in range(300):
        write(ring, number, chance.randint(2, min(longest, 60)), chance.randint(0, 9))
        if chance.random() < 0.06:
            got += [check(each) for each in reader.take()]
    got += [check(each) for each in reader.take()]
    assert got == sorted(set(got))
    assert len(got) < 300
    assert reader.num_missed == 300 - len(got)
    assert got[-1] == 299
    # A reader that comes late finds about as much as the ring holds.
    late = ring.reader().take()
    kept = sum(each.features_NF.nbytes for each in late)
    assert kept > ring.capacity * (1 - 2 / 8) - len(late) * 256
    assert [check(each) for each in late] == list(range(300 - len(late), 300))


def test_the_longest_sequence_fits(ring):
    for number in range(20):
        write(ring, number, ring.max_rows(500), extra=500 - ring.max_rows(500))
    assert len(ring.reader().take()) >= 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_process_opens_it_by_name(dtype):
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


def test_what_is_no_ring_is_refused():
    segment = OwnedSegment(1 << 16)
    with pytest.raises(InvalidInputError, match="not a feature ring"):
        FeatureReader.open(segment.name)
    with pytest.raises(InvalidInputError, match="must be a segment's name"):
        FeatureReader.open("../etc/passwd")


def test_a_size_that_holds_nothing_is_refused():
    with pytest.raises(InvalidInputError, match=r"spec\.feature_ring_bytes"):
        FeatureRing(1000, FEATURES, 576, torch.float32, field="spec.feature_ring_bytes")


def test_a_record_that_does_not_add_up_is_never_handed_out(ring):
    """A processor may show the reader new bytes and an old count."""
    for number in range(3):
        write(ring, number, 4)
    reader = ring.reader()
    ring._data[ring._starts[1] + 100] ^= 1
    assert [check(each) for each in reader.take()] == [0]
    write(ring, 3, 4)
    assert [check(each) for each in reader.take()] == [3]
    assert reader.num_missed == 2


WRITER = """
import json, random, sys
from tests.spec_workers.features.test_feature_ring import FEATURES, HIDDEN, FeatureRing
from tests.spec_workers.features.test_feature_ring import torch, write
chance = random.Random(int(sys.argv[1]))
ring = FeatureRing(1 << 20, FEATURES, HIDDEN, torch.bfloat16)
print(json.dumps({"ring": ring.name}), flush=True)
for number in range(int(sys.argv[2])):
    write(ring, number % 256, chance.randint(2, 1000), chance.randint(0, 40))
print(json.dumps({"written": number + 1}), flush=True)
sys.stdin.read()
"""


def start_writer(seed: int, count: int) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(seed), str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return process, json.loads(process.stdout.readline())["ring"]


def whole(sequence: FeatureSequence) -> int:
    """Like `check`, for numbers that bfloat16 holds."""
    value = sequence.number % 256
    assert {value, *sequence.token_ids_L.tolist()} == {value}
    assert (sequence.features_NF == value).all()
    return sequence.number


def test_a_reader_never_sees_a_torn_sequence_while_another_process_writes():
    process, name = start_writer(1, 3_000)
    try:
        reader, numbers, deadline = FeatureReader.open(name), [], time.monotonic() + HANG_SECONDS
        while not numbers or numbers[-1] < 2_999:
            assert time.monotonic() < deadline, numbers[-3:]
            numbers += [whole(each) for each in reader.take()]
        assert numbers == sorted(set(numbers))
        assert reader.num_missed == 3_000 - len(numbers)
    finally:
        process.kill()
        process.wait()


def test_a_writer_that_is_killed_leaves_whole_sequences():
    process, name = start_writer(2, 10_000_000)
    try:
        reader, numbers = FeatureReader.open(name), [-1]
        while numbers[-1] < 100:
            numbers += [whole(each) for each in reader.take()]
            time.sleep(0.01)
        late_reader = FeatureReader.open(name)  # now: a test beside this one may remove the orphan
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        late = late_reader.take()
        assert len(late) > 3
        assert [whole(each) for each in late] == sorted(each.number for each in late)
    finally:
        process.kill()
        process.wait()
    FeatureRing(64 << 10, FEATURES, HIDDEN, torch.float32).close()
    with pytest.raises(InvalidInputError, match="cannot be opened"):  # an orphan is removed
        FeatureReader.open(name)
