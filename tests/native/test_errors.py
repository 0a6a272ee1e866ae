"""Wrong arguments are refused by name, and change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from ngram_native import Corpus

I32, I64 = np.int32, np.int64


def array(dtype, *values):
    return np.array(values, dtype)


@pytest.fixture
def corpus():
    corpus = Corpus(max_bytes=1 << 20)
    corpus.open(1, 0, array(I32, 1, 2, 3))
    corpus.open(2, 0, array(I32, 1, 2, 4))
    yield corpus
    assert corpus.num_tokens == 4
    corpus.check_integrity()


ONE = array(I64, 1)
REFUSED = {
    "insert negative": (lambda c: c.insert(array(I32, 5, -7)), r"tokens\[1\]=-7"),
    "insert int64": (lambda c: c.insert(array(I64, 5)), "tokens=<array of int64>.*int32"),
    "insert list": (lambda c: c.insert([1, 2]), "tokens=<list>"),
    "insert matrix": (lambda c: c.insert(np.zeros((2, 2), I32)), r"tokens=.*\(2, 2\)"),
    "group float": (lambda c: c.insert(array(I32, 5), group=1.5), "group=1.5"),
    "group too large": (lambda c: c.insert(array(I32, 5), group=2**64), "group="),
    "open twice": (lambda c: c.open(1, 0, array(I32, 5)), "sequence_id=1: is open already"),
    "open negative": (lambda c: c.open(3, 0, array(I32, -1)), r"tokens\[0\]=-1"),
    "open id": (lambda c: c.open(2**63, 0, array(I32, 5)), "sequence_id="),
    "close unknown": (lambda c: c.close(9), "sequence_id=9: is not open"),
    "extend unknown": (
        lambda c: c.extend(array(I64, 1, 9), array(I32, 5), array(I64, 0, 1, 1)),
        "sequence_id=9",
    ),
    "extend twice": (
        lambda c: c.extend(array(I64, 1, 1), array(I32, 5), array(I64, 0, 1, 1)),
        "sequence_ids=1: is named twice",
    ),
    "extend negative": (lambda c: c.extend(ONE, array(I32, -2), array(I64, 0, 1)), "tokens"),
    "extend ids dtype": (
        lambda c: c.extend(array(I32, 1), array(I32, 5), array(I64, 0, 1)),
        "sequence_ids=<array of int32>",
    ),
    "offsets length": (lambda c: c.extend(ONE, array(I32, 5), array(I64, 0)), r"len\(offsets\)=1"),
    "offsets start": (
        lambda c: c.extend(ONE, array(I32, 5), array(I64, 1, 1)),
        r"offsets\[0\]=1",
    ),
    "offsets end": (lambda c: c.extend(ONE, array(I32, 5), array(I64, 0, 2)), r"offsets\[-1\]=2"),
    "offsets fall": (
        lambda c: c.extend(array(I64, 1, 2), array(I32, 5), array(I64, 0, 2, 1)),
        r"offsets\[2\]=1",
    ),
    "verified too many": (
        lambda c: c.extend(array(I64, 1, 2), array(I32, 5), array(I64, 0, 0, 1), array(I32, 0, 1)),
        r"verified\[1\]=1: must be in \[0, 0\]",
    ),
    "verified negative": (
        lambda c: c.extend(ONE, array(I32, 5), array(I64, 0, 1), array(I32, -1)),
        r"verified\[0\]=-1",
    ),
    "verified length": (
        lambda c: c.extend(ONE, array(I32, 5), array(I64, 0, 1), array(I32)),
        r"len\(verified\)=0: must be len\(sequence_ids\)=1",
    ),
    "verified dtype": (
        lambda c: c.extend(ONE, array(I32, 5), array(I64, 0, 1), array(I64, 0)),
        "verified=<array of int64>.*int32",
    ),
    "propose unknown": (lambda c: c.propose(array(I64, 8), array(I32, 1), 0.0), "sequence_id=8"),
    "propose twice": (
        lambda c: c.propose(array(I64, 1, 1), array(I32, 1, 1), 0.0),
        "sequence_ids=1: is named twice",
    ),
    "budget large": (lambda c: c.propose(ONE, array(I32, 64), 0.0), r"budgets\[0\]=64.*63"),
    "budget negative": (lambda c: c.propose(ONE, array(I32, -1), 0.0), r"budgets\[0\]=-1"),
    "budgets length": (lambda c: c.propose(ONE, array(I32), 0.0), r"len\(budgets\)=0"),
    "floor": (lambda c: c.propose(ONE, array(I32, 1), 1.5), "min_probability=1.5"),
    "floor nan": (lambda c: c.propose(ONE, array(I32, 1), float("nan")), "min_probability=nan"),
    "query budget": (lambda c: c.query(0, array(I32, 1), 64, 0.0), "budget=64"),
    "external negative": (lambda c: c.add_external("x", [array(I32, 1), array(I32, -1)]), "tokens"),
    "external dtype": (
        lambda c: c.add_external("x", [array(I32, 1), array(I64, 1)]),
        r"documents\[1\]",
    ),
    "external not built": (lambda c: c.publish_external("x", c.external_builder()), "builder=not"),
    "external unknown": (lambda c: c.remove_external("x"), "name='x'"),
    "version": (lambda c: c.set_weight_version("3"), "version='3'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_call_is_refused_by_name(corpus, case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(corpus)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 1}, "max_bytes=1"),
        ({"max_bytes": -1}, "max_bytes=-1"),
        ({"max_bytes": 1e9}, "max_bytes"),
        ({"max_candidates": 0}, "max_candidates=0"),
        ({"max_candidates": 8, "max_steps": 7}, "max_steps=7"),
        ({"max_external_bytes": -1}, "max_external_bytes=-1"),
    ],
)
def test_wrong_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Corpus(**options)


def test_strided_arrays_are_taken_as_they_read(corpus):
    reversed_tokens = array(I32, 9, 8, 7, 6, 5)[::-1]
    other = Corpus(max_bytes=1 << 20)
    other.insert(reversed_tokens)
    assert other.query(0, array(I32, 5, 6), 8, 0.0).tokens_N.tolist() == [7, 8, 9]
