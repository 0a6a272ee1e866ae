"""A ring of features that one process writes and another reads."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from multiprocessing.queues import SimpleQueue

import pytest
import torch

from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.features.feature_ring import FeatureReader, FeatureRing, FeatureSequence


def make_ring(num_bytes: int) -> FeatureRing:
    features = AuxHiddenStates(layers=(0, 2), final=True)
    return FeatureRing(num_bytes, features, 8, torch.bfloat16)


def write_sequences(names: SimpleQueue) -> None:
    chance, ring = random.Random(1), make_ring(1 << 20)
    names.put(ring.name)
    for number in itertools.count():
        rows_NF = torch.full((chance.randint(2, 1000), ring.num_columns), float(number % 256))
        tokens = [number % 256] * (len(rows_NF) + chance.randint(0, 40))
        blocks = rows_NF.to(ring.dtype).split(50)
        ring.write(tokens, blocks, first_position=0, prompt_len=2, weight_version=number)


def whole(sequence: FeatureSequence) -> int:
    """Check that all of it is one sequence. Returns its number."""
    value = sequence.number % 256
    assert {value, *sequence.token_ids_L.tolist()} == {value}
    assert (sequence.features_NF == value).all()
    return sequence.number


def test_a_reader_sees_whole_sequences_while_another_process_writes_and_when_it_is_killed():
    context = multiprocessing.get_context("fork")
    names = context.SimpleQueue()
    process = context.Process(target=write_sequences, args=(names,))
    process.start()
    try:
        name = names.get()
        reader, numbers = FeatureReader.open(name), [-1]
        while numbers[-1] < 3_000:
            numbers += [whole(each) for each in reader.take()]
        assert numbers == sorted(set(numbers))
        assert reader.num_missed == numbers[-1] + 2 - len(numbers)
        late_reader = FeatureReader.open(name)  # now: a test beside this one may remove the orphan
        process.kill()
        process.join()
        late = [whole(each) for each in late_reader.take()]
        assert len(late) > 3
        assert late == sorted(late)
    finally:
        process.kill()
    make_ring(64 << 10).close()
    with pytest.raises(InvalidInputError, match="cannot be opened"):  # an orphan is removed
        FeatureReader.open(name)
